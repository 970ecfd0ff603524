"""Identities that hold for any input: sums of advantages, returns, whitening, gradients of KL, top-k distillation."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import milkweed.algorithms as mw

few = settings(max_examples=25, deadline=None, derandomize=True)

rewards_of_groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]) | st.floats(-5, 5, width=32), min_size=2, max_size=6),
    min_size=1,
    max_size=4,
)


def flat(groups: list[list[float]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([r for g in groups for r in g], dtype=torch.float64)
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return rewards[order], ids[order]


@few
@given(groups=rewards_of_groups, seed=st.integers(0, 99))
def test_group_advantages_sum_to_zero_in_each_group(groups, seed):
    rewards, ids = flat(groups, seed)
    forms = [mw.dr_grpo(rewards, ids), mw.rloo(rewards, ids), mw.maxrl(rewards.abs(), ids)]
    stds = ("population", "unbiased", "none")
    forms += [mw.grpo(rewards, ids, std=s, scale=k) for s in stds for k in ("group", "batch")]
    for advantages in forms:
        for group in ids.unique():
            size = advantages[ids == group].abs().max().clamp(min=1)
            assert advantages[ids == group].sum().abs() <= 1e-8 * size


@few
@given(groups=rewards_of_groups, shift=st.floats(-3, 3))
def test_group_advantages_do_not_see_a_shift_and_rloo_is_scaled_dr_grpo(groups, shift):
    rewards, ids = flat(groups)
    shifted = rewards + shift
    torch.testing.assert_close(mw.dr_grpo(shifted, ids), mw.dr_grpo(rewards, ids), rtol=1e-6, atol=1e-9)
    size = torch.bincount(ids)[ids].double()
    torch.testing.assert_close(mw.rloo(rewards, ids), mw.dr_grpo(rewards, ids) * size / (size - 1))


@few
@given(groups=rewards_of_groups, seed=st.integers(0, 99))
def test_segments_of_a_trajectory_change_nothing_for_others(groups, seed):
    rewards, ids = flat(groups, seed)
    n = len(rewards)
    generator = torch.Generator().manual_seed(seed)
    twice = torch.cat([torch.arange(n), torch.randint(0, n, (4,), generator=generator)])
    for form in (mw.grpo, mw.rloo, mw.dr_grpo):
        once = form(rewards, ids)
        torch.testing.assert_close(form(rewards[twice], ids[twice], trajectories=twice), once[twice])
    spread = mw.rloo(rewards, ids, std="unbiased")
    torch.testing.assert_close(mw.rloo(rewards[twice], ids[twice], std="unbiased", trajectories=twice), spread[twice])


def test_groups_without_a_second_member_warn():
    with pytest.warns(RuntimeWarning, match="group ids must name the prompt"):
        mw.grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))


@few
@given(seed=st.integers(0, 10**6), discount=st.sampled_from([0.0, 0.9, 1.0]), trace=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_of_gaps_and_packed_rows_is_gae_of_the_trained_tokens_alone(seed, discount, trace):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 9, generator=g), torch.randn(2, 9, generator=g)
    mask = torch.rand(2, 9, generator=g) < 0.6
    segments = torch.tensor([[0] * 4 + [1] * 3 + [-1] * 2, [2] * 9])
    mask &= segments >= 0
    terminal = torch.randn(3, generator=g)
    truncated, bootstrap = torch.tensor([True, False, True]), torch.randn(3, generator=g)
    packed = mw.gae(
        torch.where(mask, rewards, torch.nan),
        torch.where(mask, values, torch.nan),
        mask,
        discount=discount,
        trace=trace,
        segments=segments,
        terminal=terminal,
        truncated=truncated,
        bootstrap=bootstrap,
        on_truncation="bootstrap",
    )
    for s in range(3):
        here = mask & (segments == s)
        if not here.any():
            continue
        r, v = rewards[here].clone(), values[here]
        r[-1] += terminal[s]
        following = torch.cat([v[1:], bootstrap[s : s + 1] if truncated[s] else torch.zeros(1)])
        delta, carry, wanted = r + discount * following - v, 0.0, []
        for t in range(len(r) - 1, -1, -1):
            carry = float(delta[t]) + discount * trace * carry
            wanted.insert(0, carry)
        torch.testing.assert_close(packed.advantages[here], torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    assert not packed.advantages[~mask].any() and not packed.returns[~mask].any()


@few
@given(seed=st.integers(0, 10**6), words=st.integers(2, 6))
def test_each_gradient_correct_kl_has_the_analytic_gradient(seed, words):
    g = torch.Generator().manual_seed(seed)
    reference = torch.randn(words, generator=g, dtype=torch.float64).log_softmax(-1)[None]
    start = torch.randn(words, generator=g, dtype=torch.float64)
    mask = torch.ones(1, words, dtype=torch.bool)

    def gradient(of) -> torch.Tensor:
        logits = start.clone().requires_grad_()
        of(logits.log_softmax(-1)[None]).backward()
        return logits.grad

    def expected(kind, weighted=False):
        def of(p):
            old = p.detach() if weighted else None
            return (p.detach().exp() * mw.kl_estimate(p, reference, mask, kind, old_logprobs=old)).sum()

        return gradient(of)

    exact = gradient(lambda p: (p.exp() * (p - reference)).sum())
    for kind in ("k2", "k1+", "k2+", "k3+"):
        torch.testing.assert_close(expected(kind), exact)
    for kind in ("k1", "k3"):
        torch.testing.assert_close(expected(kind, weighted=True), exact)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(exact))
    # k1 in the reward: the policy gradient on -KL is minus the exact gradient
    p = start.log_softmax(-1)[None]
    rewards = mw.kl_in_reward(torch.zeros(words), p.T, reference.T, mask.T, coefficient=1.0)
    score = gradient(lambda q: (p.exp() * q * -rewards.T).sum())
    torch.testing.assert_close(score, exact)
    # the exact form over the vocabulary agrees
    logits = start.clone().requires_grad_()
    mw.categorical_kl(logits[None, None], reference[None], mask[:, :1]).sum().backward()
    torch.testing.assert_close(logits.grad, exact)


@few
@given(seed=st.integers(0, 10**6), k=st.integers(1, 7))
def test_top_k_reverse_kl_bounds_the_full_one_and_meets_it_at_the_whole_vocabulary(seed, k):
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(2, 3, 7, generator=g, dtype=torch.float64).log_softmax(-1).requires_grad_()
    teacher = torch.randn(2, 3, 7, generator=g, dtype=torch.float64).log_softmax(-1)
    mask = torch.rand(2, 3, generator=g) < 0.7
    top = teacher.topk(k, dim=-1)
    full = torch.where(mask, (student.exp() * (student - teacher)).sum(-1), 0.0)
    for tail in ("bucket", "renormalise"):
        hidden = torch.where(mask[..., None], student.gather(-1, top.indices), torch.nan)
        part = mw.top_k_reverse_kl(hidden, top.values, mask, tail=tail)
        assert torch.isfinite(part).all() and (part >= -1e-9).all()
        (gradient,) = torch.autograd.grad(part.sum(), student, retain_graph=True)
        assert torch.isfinite(gradient).all() and not gradient[~mask].any()
        if tail == "bucket":
            assert (part <= full + 1e-9).all()
        if k == 7:
            torch.testing.assert_close(part, full, rtol=1e-6, atol=1e-8)


@few
@given(seed=st.integers(0, 10**6))
def test_whitened_tokens_have_mean_zero_and_deviation_one(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, generator=g, dtype=torch.float64) * 3 + 10
    mask = torch.rand(4, 6, generator=g) < 0.8
    mask[0, :2] = True
    out = mw.whiten(torch.where(mask, x, torch.nan), mask, epsilon=0.0)
    torch.testing.assert_close(out[mask].mean(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(out[mask].std(), torch.ones((), dtype=torch.float64))
    kept = mw.whiten(x, mask, epsilon=0.0, shift_mean=False)
    torch.testing.assert_close(kept[mask].mean(), x[mask].mean())
    assert not mw.whiten(torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)).any()


def test_whitening_over_ranks_is_whitening_of_all_their_tokens():
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    parts = [slice(0, 1), slice(1, 6), slice(6, 6)]  # uneven, one rank has nothing
    store, out, errors = torch.distributed.HashStore(), {}, []

    def rank(i: int) -> None:
        try:
            group = torch.distributed.ProcessGroupGloo(store, i, len(parts), timedelta(seconds=20))
            out[i] = mw.whiten(x[parts[i]], mask[parts[i]], group=group)
        except Exception as error:  # shown below: a thread's exception is lost otherwise
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(len(parts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert not errors and len(out) == len(parts), errors
    torch.testing.assert_close(torch.cat([out[i] for i in range(len(parts))]), mw.whiten(x, mask))


@few
@given(
    st.lists(st.floats(-60, 60), min_size=1, max_size=8), st.sampled_from(["token", "sequence_mean", "sequence_sum"])
)
def test_correction_never_raises_a_weight(log_ratios, level):
    log = torch.tensor([log_ratios], dtype=torch.float64)
    mask = torch.ones_like(log, dtype=torch.bool)
    for mode in ("truncate", "mask"):
        out = mw.importance_weights(log, torch.zeros_like(log), mask, level=level, mode=mode, upper=2.0, lower=0.5)
        assert (out.gate <= 1).all() and (out.gate >= 0).all() and (out.weights <= 2.0 + 1e-12).all()


def test_entropy_of_the_vocabulary_and_its_gradient_with_words_ruled_out():
    logits = torch.tensor([[[1.0, -torch.inf, 0.5], [0.0, 0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    out = mw.token_entropy(logits)
    out.sum().backward()
    kept = torch.distributions.Categorical(logits=torch.tensor([1.0, 0.5], dtype=torch.float64)).entropy()
    torch.testing.assert_close(out.detach(), torch.stack([kept, torch.tensor(3.0, dtype=torch.float64).log()])[None])
    assert torch.isfinite(logits.grad).all()


def test_half_precision_is_summed_in_float32():
    x = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert mw.masked_mean(x, mask).dtype == torch.float32
    torch.testing.assert_close(mw.masked_sum(x, mask), x.double().sum().float())


@pytest.mark.parametrize("bad", [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64)])
def test_a_mask_that_is_not_bool_is_refused(bad):
    with pytest.raises(ValueError, match="mask must be bool"):
        mw.masked_mean(torch.zeros(2, 2), bad)


def test_sft_warns_of_a_batch_without_labels():
    from algorithms_support import Policy, make_sequences, pack

    packed = pack(make_sequences(0, 2), [[0, 1]])
    packed.batch.totals["tokens"] = 0
    with pytest.warns(RuntimeWarning, match="no token of this batch is trained"):
        mw.sft_loss()(packed.batch, Policy(torch.zeros(100), packed.index.clamp(max=99), packed.batch.mask))
