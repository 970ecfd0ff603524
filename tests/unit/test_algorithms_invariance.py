"""Loss and gradient do not change with micro-batch split, packing order or padding; nothing masked is read."""

from __future__ import annotations

import random

import cloudpickle
import pytest
import torch
from algorithms_support import NAN, loss_and_gradient, make_sequences, pack
from hypothesis import given, settings
from hypothesis import strategies as st

import milkweed.algorithms as mw

TOKEN_LOSSES = {
    "grpo": mw.grpo_loss(),
    "dapo": mw.grpo_loss(clip=0.2, clip_high=0.28, dual_clip=3.0, entropy=0.01),
    "grpo-kl": mw.grpo_loss(kl=0.1, kl_kind="k3"),
    "grpo-corrected": mw.grpo_loss(correction=mw.Correction(level="sequence_mean", upper=1.05)),
    "grpo-on-policy": mw.grpo_loss(on_policy=True, kl=0.1),
    "gspo": mw.gspo_loss(clip=0.1, clip_high=0.1),
    "gspo-token": mw.gspo_loss(clip=0.1, clip_high=0.1, per_token=True),
    "cispo": mw.cispo_loss(max_ratio=1.2),
    "reinforce": mw.reinforce_loss(),
    "sft": mw.sft_loss(),
    "distill": mw.distill_loss(),
    "distill-ppo": mw.distill_loss(clip=0.2),
    "value": mw.value_loss(clip=0.2),
}
PAIR_LOSSES = {
    "dpo": mw.dpo_loss(),
    "cdpo": mw.dpo_loss(label_smoothing=0.1),
    "ipo": mw.ipo_loss(),
    "orpo": mw.orpo_loss(),
    "simpo": mw.simpo_loss(),
    "reward-model": mw.reward_model_loss(centre=0.01),
}
few = settings(max_examples=15, deadline=None, derandomize=True)


def split(rng: random.Random, items: list[int]) -> list[list[int]]:
    """Some order and some split into parts."""
    items = items[:]
    rng.shuffle(items)
    parts: list[list[int]] = []
    while items:
        n = rng.randint(1, len(items))
        parts.append(items[:n])
        items = items[n:]
    return parts


def parameters(sequences, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = sum(len(s.mask) for s in sequences)
    flat = torch.tensor([x for s in sequences for x in s.logprobs], dtype=torch.float64)
    return torch.cat([flat - 0.3 * torch.rand(n, generator=generator, dtype=torch.float64), torch.tensor([NAN])])


def check(loss, sequences, first, second, how, seed, padding):
    theta = parameters(sequences, seed)
    rng = random.Random(seed)
    a = pack(sequences, first, how=how)
    b = pack(sequences, second, padding=padding, how=how)
    one, gradient = loss_and_gradient(loss, a, theta, [list(range(len(first)))])
    other, again = loss_and_gradient(loss, b, theta, split(rng, list(range(len(second)))))
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(again[:-1], gradient[:-1], rtol=1e-6, atol=1e-9)
    assert torch.isfinite(one) and torch.isfinite(gradient[:-1]).all()
    assert gradient[-1] == again[-1] == 0  # the padding's


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@few
@given(seed=st.integers(0, 10**6), count=st.integers(2, 7), padding=st.integers(0, 3))
def test_token_losses_do_not_depend_on_split_packing_or_padding(name, seed, count, padding):
    rng = random.Random(seed)
    sequences = make_sequences(seed, count)
    how = rng.choice(["token", "sequence", "constant"])
    alone = [[i] for i in range(count)]
    check(TOKEN_LOSSES[name], sequences, alone, [*split(rng, list(range(count))), []], how, seed, padding)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@few
@given(seed=st.integers(0, 10**6), pairs=st.integers(1, 4), padding=st.integers(0, 3))
def test_pair_losses_do_not_depend_on_split_packing_or_padding(name, seed, pairs, padding):
    rng = random.Random(seed)
    sequences = make_sequences(seed, 2 * pairs)
    for s in sequences:
        s.mask[-1] = True
    alone = [[2 * i, 2 * i + 1] for i in range(pairs)]
    packed = [[j for i in row for j in rng.sample([2 * i, 2 * i + 1], 2)] for row in split(rng, list(range(pairs)))]
    check(PAIR_LOSSES[name], sequences, alone, [*packed, []], "token", seed, padding)


@few
@given(seed=st.integers(0, 10**6), count=st.integers(2, 6))
def test_kto_does_not_depend_on_the_split(seed, count):
    rng = random.Random(seed)
    sequences = make_sequences(seed, count)
    alone = [[i] for i in range(count)]
    check(mw.kto_loss(undesirable_weight=1.3), sequences, alone, split(rng, list(range(count))), "token", seed, 2)


def test_nan_inside_the_mask_surfaces_in_every_loss():
    sequences = make_sequences(3, 4)
    for s in sequences:
        s.mask[-1] = True
    packed = pack(sequences, [[0, 1], [2, 3]])
    theta = parameters(sequences, 3)
    theta[len(sequences[0].mask) - 2 : len(sequences[0].mask)] = NAN  # the last token of sequence 0, and before it
    for name, loss in (TOKEN_LOSSES | PAIR_LOSSES).items():
        total, _ = loss_and_gradient(loss, packed, theta, [[0, 1]])
        assert total.isnan(), name


def test_a_pair_parted_over_rows_is_refused_by_name():
    sequences = make_sequences(1, 4)
    for s in sequences:
        s.mask[-1] = True
    packed = pack(sequences, [[0, 2], [1, 3]])
    with pytest.raises(ValueError, match="pack both in a row"):
        loss_and_gradient(mw.dpo_loss(), packed, parameters(sequences, 1), [[0], [1]])


@pytest.mark.parametrize("name", [*TOKEN_LOSSES, *PAIR_LOSSES])
def test_losses_travel_by_value(name):
    loss = (TOKEN_LOSSES | PAIR_LOSSES)[name]
    sequences = make_sequences(5, 4)
    for s in sequences:
        s.mask[-1] = True
    packed, theta = pack(sequences, [[0, 1], [2, 3]]), parameters(sequences, 5)
    copy = cloudpickle.loads(cloudpickle.dumps(loss))
    torch.testing.assert_close(
        loss_and_gradient(copy, packed, theta, [[0, 1]])[0], loss_and_gradient(loss, packed, theta, [[0, 1]])[0]
    )


def test_metrics_have_the_batch_shape_and_no_gradient():
    sequences = make_sequences(6, 4)
    packed, theta = pack(sequences, [[0, 1], [2, 3]], padding=2), parameters(sequences, 6).requires_grad_()
    from algorithms_support import Policy

    wanted = {"grpo-kl": {"ratio", "clip_fraction", "approx_kl", "kl", "entropy"}, "grpo-corrected": {"mismatch_ratio"}}
    for name in TOKEN_LOSSES:
        _, metrics = TOKEN_LOSSES[name](packed.batch, Policy(theta, packed.index, packed.batch.mask))
        assert wanted.get(name, set()) <= set(metrics), name
        for key, value in metrics.items():
            assert value.shape == packed.batch.mask.shape and not value.requires_grad, (name, key)
            assert torch.isfinite(value).all(), (name, key)


@few
@given(seed=st.integers(0, 10**6))
def test_at_equal_policies_every_ratio_is_exactly_one(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(3, 5, generator=generator) * 30
    mask = torch.rand(3, 5, generator=generator) < 0.7
    advantages = torch.randn(3, 5, generator=generator)
    for surrogate in (mw.ppo_clip, mw.gspo, mw.cispo):
        out = surrogate(logprobs, logprobs.clone(), advantages, mask)
        assert torch.equal(out.metrics["ratio"], mask.float())
        assert not out.metrics["clip_fraction"].any() and not out.metrics["approx_kl"].any()
    for level in ("token", "sequence_mean", "sequence_sum"):
        assert torch.equal(mw.importance_weights(logprobs, logprobs, mask, level=level).weights, mask.float())


def test_a_loss_says_what_the_batch_lacks():
    sequences = make_sequences(2, 2)
    packed, theta = pack(sequences, [[0, 1]]), parameters(sequences, 2)
    for name, loss in {
        "old_logprobs": mw.grpo_loss(correction=mw.Correction()),
        "reference_logprobs": mw.grpo_loss(kl=0.1),
        "returns": mw.value_loss(),
        "teacher_logprobs": mw.distill_loss(),
        "teacher_top_ids": mw.distill_top_k_loss(),
        "pair": mw.dpo_loss(),
    }.items():
        lacking = pack(sequences, [[0, 1]])
        lacking.batch.extra.pop(name, None)
        with pytest.raises(ValueError, match=name):
            loss_and_gradient(loss, lacking, theta, [[0]])
    del packed.batch.extra["old_logprobs"]  # the ratio is then against the engine's log-probs
    loss_and_gradient(mw.grpo_loss(), packed, theta, [[0]])
    with pytest.raises(ValueError, match="kl_kind"):
        mw.grpo_loss(kl=0.1, kl_kind="k5")
