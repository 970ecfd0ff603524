"""Options of the algorithms, each by its own small example."""

from __future__ import annotations

import pytest
import torch

import milkweed.algorithms as mw

T = torch.tensor


def test_reinforce_fits_where_rewards_and_groups_are_given():
    rewards, groups = T([1.0, 0.0, 2.0]), T([0, 0, 1])
    assert mw.reinforce(rewards, groups).tolist() == [1, 0, 2]
    assert mw.reinforce(rewards, groups, baseline="batch").tolist() == [0, -1, 1]
    assert mw.reinforce(T([0.1, 0.1, 0.1]), baseline="batch").tolist() == [0, 0, 0]
    assert mw.reinforce(rewards, baseline="batch", valid=T([True, True, False])).tolist() == [0.5, -0.5, 0]


def test_unknown_names_are_refused_with_the_known_ones():
    rewards, groups = T([1.0, 0.0]), T([0, 0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for call, known in (
        (lambda: mw.grpo(rewards, groups, std="sample"), "unbiased"),
        (lambda: mw.grpo(rewards, groups, scale="all"), "batch"),
        (lambda: mw.rloo(rewards, groups, std="sample"), "population"),
        (lambda: mw.grpo(rewards, groups, single="skip"), "refuse"),
        (lambda: mw.reinforce(rewards, baseline="group"), "batch"),
        (lambda: mw.loss_weights(mask, "mean"), "sequence"),
        (lambda: mw.loss_weights(mask, "constant"), "above 0"),
        (lambda: mw.kl_estimate(rewards[None], rewards[None], mask, "abs"), "k3"),
        (lambda: mw.importance_weights(rewards[None], rewards[None], mask, level="batch"), "sequence_mean"),
        (lambda: mw.importance_weights(rewards[None], rewards[None], mask, mode="clip"), "truncate"),
        (lambda: mw.gae(rewards[None], rewards[None], mask, on_truncation="cut"), "bootstrap"),
        (lambda: mw.supervised_mask(mask, groups[None], "prompt"), "completion"),
        (lambda: mw.top_k_reverse_kl(rewards[None, None], rewards[None, None], mask[:, :1], tail="drop"), "bucket"),
    ):
        with pytest.raises(ValueError, match=known):
            call()


def test_numbers_out_of_range_are_refused():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for call in (
        lambda: mw.ppo_clip(x, x, x, mask, clip=-0.1),
        lambda: mw.ppo_clip(x, x, x, mask, dual_clip=1.0),
        lambda: mw.cispo(x, x, x, mask, min_ratio=2.0, max_ratio=1.0),
        lambda: mw.clipped_value_loss(x, x, x, mask, clip=0.0),
        lambda: mw.gae(x, x, mask, discount=1.1),
        lambda: mw.soft_penalty(T([1]), limit=4, buffer=5),
        lambda: mw.high_entropy_mask(x, mask, 0.0),
        lambda: mw.dynamic_sampling(x[0], T([0, 0]), low=0.9, high=0.1),
        lambda: mw.ipo(x[0], x[0], x[0], x[0], beta=0.0),
        lambda: mw.temper(x, float("nan")),
    ):
        with pytest.raises(ValueError):
            call()


def test_missing_scores_are_left_out_and_ids_may_be_anything():
    rewards, valid = mw.scored([1.0, None, 0.0])
    assert valid.tolist() == [True, False, True]
    assert mw.group_ids(["b", ("a", 1), "b"]).tolist() == [0, 1, 0]
    assert mw.dr_grpo(rewards, mw.group_ids("ggg"), valid=valid).tolist() == [0.5, 0, -0.5]


def test_share_of_groups_with_signal():
    rewards, groups = T([1.0, 1.0, 1.0, 0.0, 5.0]), T([0, 0, 1, 1, 2])
    assert mw.signal_fraction(rewards, groups) == pytest.approx(1 / 3)
    assert mw.signal_fraction(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == 0.0


def test_high_entropy_mask_takes_ties_and_only_trained_tokens():
    entropy = T([[9.0, 2.0, 2.0, 1.0, 0.0]])
    mask = T([[False, True, True, True, True]])
    assert mw.high_entropy_mask(entropy, mask, 0.25).tolist() == [[False, True, True, False, False]]
    assert not mw.high_entropy_mask(entropy, torch.zeros_like(mask)).any()


def test_overlong_filter_knows_packed_sequences():
    mask, segments = T([[True, True, True, False]]), T([[0, 0, 1, -1]])
    out = mw.overlong_mask(mask, T([True, False]), segments)
    assert out.tolist() == [[False, False, True, False]]
    with pytest.raises(ValueError, match="truncated has 1"):
        mw.overlong_mask(mask, T([True]), segments)


def test_a_cut_completion_gets_the_full_soft_penalty():
    assert mw.soft_penalty(T([3, 3]), 8, 4, truncated=T([True, False])).tolist() == [-1.0, 0.0]


def test_kto_reference_point_is_a_mean_over_the_batch_and_not_negative():
    assert float(mw.kto_reference_point(T([-1.0, -2.0]), T([-2.0, -2.0]))) == 0.5
    assert float(mw.kto_reference_point(T([-3.0]), T([-2.0]))) == 0.0
    assert float(mw.kto_reference_point(torch.zeros(0), torch.zeros(0))) == 0.0


def test_weights_of_a_part_use_the_total_given():
    mask = T([[True, True, False], [True, False, False]])
    assert mw.loss_weights(mask, "token", total=6).tolist()[0] == pytest.approx([1 / 6, 1 / 6, 0])
    assert mw.loss_weights(mask, "sequence", total=4).tolist()[0] == pytest.approx([1 / 8, 1 / 8, 0])
    assert mw.loss_weights(mask, ("constant", 10)).tolist()[1] == pytest.approx([1 / 20, 0, 0])


def test_segments_of_a_trajectory_share_one_length_when_their_ids_are_the_trajectorys():
    mask, steps = T([[True, True, True, True]]), T([[0, 1, 1, 2]])
    trajectory = T([[0, 0, 0, 1]])
    assert mw.loss_weights(mask, "sequence", segments=steps).tolist()[0] == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 3])
    assert mw.loss_weights(mask, "sequence", segments=trajectory).tolist()[0] == pytest.approx([1 / 6] * 3 + [1 / 2])


def test_values_are_read_before_the_token_and_scores_after_the_last():
    head, segments = T([[1.0, 2.0, 3.0, 4.0, 9.0]]), T([[0, 0, 1, 1, -1]])
    assert mw.values_before(head, segments).tolist() == [[0, 1, 0, 3, 0]]
    mask = T([[False, True, False, True, False]])
    assert mw.segment_sum(head, mw.segment_last(mask, segments), segments).tolist() == [2, 4]


def test_losses_show_their_options():
    assert "clip=0.1" in repr(mw.grpo_loss(clip=0.1)) and "kl_kind='k3+'" in repr(mw.grpo_loss())


def test_a_surrogate_of_ones_own_is_a_function():
    def mine(logprobs, old, advantages, mask, segments):
        return mw.TokenLoss(-(mw.keep(logprobs, mask) - mw.keep(old, mask)) * mw.keep(advantages, mask), {})

    from algorithms_support import loss_and_gradient, make_sequences, pack

    sequences = make_sequences(4, 3)
    packed = pack(sequences, [[0, 1, 2]])
    theta = torch.zeros(sum(len(s.mask) for s in sequences) + 1, dtype=torch.float64)
    total, gradient = loss_and_gradient(mw.surrogate_loss(mine, kl=0.1), packed, theta, [[0]])
    assert torch.isfinite(total) and gradient.abs().sum() > 0
