"""Packing: nothing lost, nothing counted twice, weights that sum to what they say."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milkweed.algorithms import dr_grpo
from milkweed.data import pack, pack_pairs
from milkweed.errors import DataError
from milkweed.runs.batch import batch
from milkweed.types import Group, Prompt, Sampling, Trajectory


def trajectory(prompt, reply, *, reward=1.0, temperature=1.0, **fields):
    n, m = len(prompt), len(reply)
    return Trajectory(
        token_ids=[*prompt, *reply],
        loss_mask=[False] * n + [True] * m,
        logprobs=[9.0] * n + [-0.5 - i for i in range(m)],
        versions=[],
        turns=[],
        finish_reason="stop",
        sampling=Sampling(temperature=temperature),
        reward=reward,
        **fields,
    )


def by_segment(batch, name):
    """Values of each sequence in order, whichever row it went to."""
    values = batch.tensors()[name]
    return [values[batch.segments == s].tolist() for s in range(int(batch.segments.max()) + 1)]


def test_the_worked_example():
    batch = pack([trajectory([5, 6], [7, 8]), trajectory([9], [4, 4])], [1.0, -1.0], row_len=8)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 4, 4, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 0]]
    assert batch.weights.tolist() == [[0, 0, 0.25, 0.25, 0, 0.25, 0.25, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -0.5, -1.5, 0, -0.5, -1.5, 0]]
    assert batch.advantages.tolist() == [[0, 0, 1, 1, 0, -1, -1, 0]]
    assert batch.totals == {"tokens": 4, "sequences": 2, "groups": 2}
    assert {t.dtype for t in (batch.tokens, batch.positions, batch.segments)} == {torch.int64}
    assert {t.dtype for t in (batch.weights, batch.logprobs, batch.advantages)} == {torch.float32}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.booleans()), min_size=1, max_size=30),
    st.sampled_from(["token", "sequence", ("constant", 7)]),
)
def test_every_token_is_packed_once_and_no_sequence_is_cut(shapes, normalise):
    ts = [
        trajectory([i] * p, [100 + i] * m, id=str(i), dropped="why" if drop else None)
        for i, (p, m, drop) in enumerate(shapes)
    ]
    kept = [t for t in ts if t.dropped is None and sum(t.loss_mask[1:])]
    if not kept:
        with pytest.raises(DataError, match="none of"):
            pack(ts, [1.0] * len(ts), row_len=24, normalise=normalise)
        return
    batch = pack(ts, [float(i) for i in range(len(ts))], row_len=24, normalise=normalise)
    assert by_segment(batch, "tokens") == [t.token_ids for t in kept]
    assert by_segment(batch, "positions") == [list(range(len(t.token_ids))) for t in kept]
    for row in batch.segments.tolist():
        filled = [s for s in row if s >= 0]
        assert row[: len(filled)] == filled  # padding only at the end
        assert len(set(filled)) == sum(1 for a, b in zip([None, *filled], filled, strict=False) if a != b)
    rows_of = [set((batch.segments == s).nonzero()[:, 0].tolist()) for s in range(len(kept))]
    assert all(len(r) == 1 for r in rows_of)
    assert not (batch.mask & (batch.positions == 0)).any()
    assert not batch.weights[~batch.mask].any() and (batch.weights[batch.mask] > 0).all()
    total = float(batch.weights.sum())
    trained = [sum(t.loss_mask[1:]) for t in kept]
    if normalise == ("constant", 7):
        assert total == pytest.approx(sum(trained) / (7 * len(kept)))
    else:
        assert total == pytest.approx(1.0)
    assert batch.totals["tokens"] == sum(trained)


def test_L4_A15_rows_without_a_trained_token_are_counted_nowhere():
    ts = [trajectory([1, 2], [3]), trajectory([1, 2], []), trajectory([], [3])]
    for normalise in ("token", "sequence", ("constant", 1)):
        batch = pack(ts, [1.0, 1.0, 1.0], row_len=8, normalise=normalise)
        assert batch.totals == {"tokens": 1, "sequences": 1, "groups": 1}
        assert float(batch.weights.sum()) == pytest.approx(1.0)


def test_unscored_and_dropped_are_left_out_and_never_zero():
    ts = [
        trajectory([1], [2], id="a"),
        trajectory([1], [3], id="b", reward=None),
        trajectory([1], [4], id="c", dropped="reward raised"),
    ]
    batch = pack(ts, [1.0, float("nan"), float("nan")], row_len=8)
    assert by_segment(batch, "tokens") == [[1, 2]]
    assert len(by_segment(pack([t for t in ts if not t.dropped], row_len=8), "tokens")) == 2  # supervised: no reward


def test_A9_segments_of_one_trajectory_count_once_and_share_its_advantage():
    first, second, other = trajectory([1], [2, 3, 4]), trajectory([1, 2], [5]), trajectory([1], [6, 7])
    batch = pack(
        [first, second, other],
        [2.0, 2.0, -1.0],
        row_len=16,
        normalise="sequence",
        sequences=["x", "x", "y"],
        groups=["g", "g", "g"],
    )
    assert batch.totals == {"tokens": 6, "sequences": 2, "groups": 1}
    sums = [sum(w) for w in by_segment(batch, "weights")]
    assert sums == pytest.approx([3 / 8, 1 / 8, 1 / 2])  # x's four tokens share one half
    assert [max(a, key=abs) for a in by_segment(batch, "advantages")] == [2.0, 2.0, -1.0]


@pytest.mark.parametrize("how", ["sequence", ("constant", 4.0)])
def test_A9_a_batch_of_groups_counts_the_segments_of_a_trajectory_once_in_the_divisor_too(how):
    """Segments have no ids of their own; which trajectory they are of is known where the batch is made."""
    split = trajectory([1, 2], [5], reward=1.0, id="x", segments=[trajectory([1], [2, 3, 4])])
    alone = trajectory([1], [6, 7], reward=0.0, id="y")
    made = batch([Group(id="g", prompt=Prompt(id="p", messages=[]), trajectories=[split, alone])], dr_grpo, normalise=how)
    assert made.totals == {"tokens": 6, "sequences": 2, "groups": 1}
    sums = [sum(w) for w in by_segment(made, "weights")]
    assert sums == pytest.approx([3 / 8, 1 / 8, 1 / 2] if how == "sequence" else [3 / 8, 1 / 8, 2 / 8])
    assert [max(a, key=abs) for a in by_segment(made, "advantages")] == [0.5, 0.5, -0.5]


def test_A10_A12_groups_are_counted_by_id():
    same = [trajectory([1], [2], id=f"{g}{i}", group_id=g) for g in "pq" for i in range(3)]
    assert pack(same, [0.0] * 6, row_len=8).totals["groups"] == 2


def test_advantages_and_extras_per_token_follow_their_tokens():
    ts = [trajectory([1], [2, 3]), trajectory([4], [5])]
    batch = pack(ts, [[9, 1, 2], [9, 3]], row_len=4, extra={"reference_logprobs": [[0, -1, -2], [0, -3]]})
    assert by_segment(batch, "advantages") == [[0, 1, 2], [0, 3]]
    assert by_segment(batch, "reference_logprobs") == [[0, -1, -2], [0, -3]]
    assert batch.select(slice(0, 1)).extra["reference_logprobs"].shape == (1, 4)
    with pytest.raises(DataError, match="2 tokens and 3 advantages"):
        pack(ts, [[9, 1, 2], [9, 3, 4]], row_len=4)


def test_what_does_not_fit_is_named():
    ts = [trajectory([1], [2] * 9, id="big"), trajectory([1], [2], id="small")]
    with pytest.raises(DataError, match="'big' has 10 tokens, more than a row of 8"):
        pack(ts, [1.0, 1.0], row_len=8)
    assert pack(ts, [1.0, 1.0], row_len=8, too_long="drop").totals["sequences"] == 1
    with pytest.raises(DataError, match="'small' is not finite"):
        pack(ts, [1.0, float("nan")], row_len=16)
    with pytest.raises(DataError, match="2 trajectories, 1 advantages"):
        pack(ts, [1.0], row_len=16)
    with pytest.raises(DataError, match="normalise='mean'"):
        pack(ts, [1.0, 1.0], row_len=16, normalise="mean")
    with pytest.raises(DataError, match="none of 0"):
        pack([], [], row_len=16)


def test_one_batch_has_one_temperature():
    ts = [trajectory([1], [2], temperature=0.7), trajectory([1], [2])]
    with pytest.raises(DataError, match=r"temperatures \[0.7, 1.0\]"):
        pack(ts, [1.0, 1.0], row_len=8)
    assert pack(ts, [1.0, 1.0], row_len=8, temperature=1.0).temperature == 1.0
    assert pack(ts[:1], [1.0], row_len=8).temperature == 0.7
    assert pack([trajectory([1], [2], temperature=0.0)], [1.0], row_len=8).temperature == 1.0


def test_rows_are_filled_by_best_fit_and_trimmed_on_request():
    ts = [trajectory([1], [2] * (n - 1)) for n in (5, 3, 3, 5)]
    batch = pack(ts, [1.0] * 4, row_len=8)
    assert batch.rows == 2 and bool((batch.segments >= 0).all())
    assert pack(ts[:1], [1.0], row_len=64, multiple=4).tokens.shape == (1, 8)
    assert pack(ts[:1], [1.0]).tokens.shape == (1, 64)


def test_packing_256_trajectories_takes_milliseconds():
    ts = [trajectory(range(10), range(10), id=str(i)) for i in range(256)]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        pack(ts, [1.0] * 256, row_len=256)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02  # 2 ms alone; the machine may be busy


def pairs_of(*lengths):
    """(chosen, rejected) with replies of these lengths, tokens that name pair and side."""
    return [
        (trajectory([i, i], [100 + i] * a, id=f"{i}"), trajectory([i, i], [200 + i] * b, id=f"{i}"))
        for i, (a, b) in enumerate(lengths)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20), st.integers(22, 60))
def test_both_sides_of_a_pair_lie_in_one_row_and_say_which_they_are(lengths, row_len):
    batch = pack_pairs(pairs_of(*lengths), row_len=row_len)
    pair, chosen = batch.extra["pair"], batch.extra["chosen"]
    assert pair.dtype == torch.int64 and chosen.dtype == torch.bool and batch.totals["pairs"] == len(lengths)
    assert torch.equal(pair < 0, batch.segments < 0) and not chosen[batch.segments < 0].any()
    for i, (a, b) in enumerate(lengths):
        (row,) = (pair == i).any(1).nonzero().flatten().tolist()
        assert batch.tokens[row][(pair[row] == i) & chosen[row]].tolist() == [i, i] + [100 + i] * a
        assert batch.tokens[row][(pair[row] == i) & ~chosen[row]].tolist() == [i, i] + [200 + i] * b
    assert batch.totals["tokens"] == sum(map(sum, lengths)) and batch.totals["sequences"] == 2 * len(lengths)


def test_a_pair_of_which_one_side_cannot_be_trained_is_left_out_whole():
    pairs = pairs_of((2, 2), (2, 2), (2, 2))
    pairs[1][1].dropped = "why"
    batch = pack_pairs(pairs, margins=[0.5, 1.0, 2.0])
    assert batch.totals["pairs"] == 2 and sorted(batch.extra["pair"].unique().tolist()) == [-1, 0, 2]
    assert batch.extra["margin"][batch.extra["pair"] == 2].unique().tolist() == [2.0]
    with pytest.raises(DataError, match="share its row have 20 tokens"):
        pack_pairs(pairs_of((8, 8)), row_len=16)
    assert pack_pairs(pairs_of((8, 8), (1, 1)), row_len=16, too_long="drop").totals["pairs"] == 1
    with pytest.raises(DataError, match="2 pairs, 1 margins"):
        pack_pairs(pairs_of((1, 1), (1, 1)), margins=[1.0])


def test_extras_keep_their_kind_and_may_be_k_wide():
    ts = [trajectory([1], [2, 3]), trajectory([1], [2])]
    ids = [np.arange(6).reshape(3, 2), np.arange(4).reshape(2, 2)]
    batch = pack(ts, row_len=8, extra={"ids": ids, "value": [[1, 2, 3], [4, 5]], "top": [torch.tensor(x) / 2 for x in ids]})
    assert batch.extra["ids"].dtype == torch.int64 and batch.extra["ids"].shape == (1, 8, 2)
    assert batch.extra["ids"][0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [0, 0], [0, 0], [0, 0]]
    assert batch.extra["value"].dtype == torch.float32 and batch.extra["value"][0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert batch.extra["top"].dtype == torch.float32 and batch.select([0]).extra["top"].shape == (1, 8, 2)
    with pytest.raises(DataError, match=r"ids of shape \[3, 1\]"):
        pack(ts, row_len=8, extra={"ids": [ids[0], np.zeros((3, 1))]})
