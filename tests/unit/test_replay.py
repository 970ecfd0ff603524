"""What a replay needs: batches to the bit, losses by source, the steps that belong to the run, and what is refused."""

import functools
import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milkweed.data.ledger import Ledger, Model
from milkweed.data.ledger.batches import pack_batch, unpack_batch
from milkweed.errors import DataError
from milkweed.runs.replay import Record
from milkweed.training.shipping import ship
from milkweed.training.sources import changed
from milkweed.types import Batch, PolicyVersion


def batch(rows=2, seq=16, seed=0, **extra):
    dice = torch.Generator().manual_seed(seed)
    real = lambda: torch.randn(rows, seq, generator=dice)  # noqa: E731
    whole = lambda high: torch.randint(-1, high, (rows, seq), generator=dice)  # noqa: E731
    mask = whole(1) < 0
    return Batch(tokens=whole(90_000).abs(), positions=torch.arange(seq).expand(rows, seq).clone(), segments=whole(5), mask=mask,
                 weights=mask / 7.0, logprobs=real() * mask, advantages=real(), extra=extra, totals={"tokens": 7.0}, temperature=0.7)  # fmt: skip


def packed(b):
    return pack_batch(b.tensors(), b.totals, b.temperature)


def bits(x):
    return x.contiguous().flatten().view(torch.uint8).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 1000))
def test_a_batch_comes_back_to_the_bit(rows, seq, seed):
    strange = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-45]).repeat(rows * seq)[: rows * seq].reshape(rows, seq)
    more = {"strange": strange, "ids": torch.full((rows, seq, 3), 2**40), "half": strange.bfloat16(), "pair": torch.full((rows, seq), -1)}
    one = batch(rows, seq, seed, **more)
    two = unpack_batch(packed(one))
    assert (two.totals, two.temperature, list(two.extra)) == (one.totals, one.temperature, list(one.extra))
    for name, tensor in one.tensors().items():
        got = two.tensors()[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape and bits(got) == bits(tensor), name


def test_a_packed_batch_takes_about_eight_bytes_a_token():
    seq, rows = 1024, 16
    b = batch(rows, seq)
    b.segments = (torch.arange(rows * seq) // 200).reshape(rows, seq)
    b.mask = b.positions % 200 > 20
    b.weights, b.advantages = b.mask / 5.0, b.segments * b.mask / 3.0
    assert len(packed(b)) / (rows * seq) < 9


CODE = """
import torch
SCALE = {scale}
def half(x):
    return x / {half}
def loss(batch, policy, power=1):
    return half(policy.logprobs ** power) * SCALE
def unused():
    return 1
"""


@pytest.fixture
def load(tmp_path):
    def make(scale=2, half=2):
        (tmp_path / "mine.py").write_text(CODE.format(scale=scale, half=half))
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["mine"] = module
        spec.loader.exec_module(module)
        import linecache

        linecache.checkcache()
        return module

    yield make
    sys.modules.pop("mine", None)


def test_a_loss_is_known_by_its_source_by_what_it_calls_and_by_what_it_holds(load):
    mine = load()
    one = ship(mine.loss)
    assert [p.name for p in one.parts] == ["loss", "half"]
    hashes = {one.sha256, ship(functools.partial(mine.loss, power=2)).sha256, ship(functools.partial(mine.loss, power=3)).sha256}
    hashes |= {ship(load(scale=3).loss).sha256, ship(load(half=3).loss).sha256}
    assert len(hashes) == 5
    assert ship(load().loss).sha256 == one.sha256


def test_a_changed_helper_is_found_and_shown(load):
    shipped = ship(load(half=2).loss)
    assert changed(shipped.parts) == ""
    load(half=4)
    assert "-    return x / 2\n+    return x / 4" in changed(shipped.parts)


def closing_over(scale):
    def loss(batch, policy):
        return policy.logprobs * scale

    return loss


def test_losses_of_ours_and_closures_are_followed():
    import milkweed as mw

    shipped = ship(mw.algorithms.grpo_loss(clip=0.3))
    assert "ppo_clip" in {p.name for p in shipped.parts} and changed(shipped.parts) == ""
    assert ship(mw.algorithms.grpo_loss(clip=0.2)).sha256 != shipped.sha256
    assert ship(closing_over(1.0)).sha256 != ship(closing_over(2.0)).sha256


def ledger(folder, life=0, step=0):
    made = Ledger(folder / "ledger", threaded=False)
    made.resume(PolicyVersion(life, step))
    import importlib.metadata
    import json

    stack = json.dumps({"torch": torch.__version__, "torchtitan": importlib.metadata.version("torchtitan")})
    made.model(Model(role="trainer", folder="m", head="policy", config="{}", mesh="local", stack=stack))
    return made


def train(made, life, steps, loss, checkpoint=0):
    for step in steps:
        made.train(PolicyVersion(life, step), [])
        made.update("trainer", PolicyVersion(life, step), batch(seed=100 * life + step), ship(loss), 0.5, {"loss": float(step)})
    if checkpoint:
        made.checkpoint(PolicyVersion(life, checkpoint))
    made.close()


def test_steps_that_a_later_life_went_back_over_are_not_replayed(tmp_path, load):
    mine = load()
    train(ledger(tmp_path), 0, range(1, 6), mine.loss, checkpoint=3)
    train(ledger(tmp_path, 1, 3), 1, range(4, 5), mine.loss, checkpoint=4)
    record = Record(tmp_path)
    assert (record.first(), record.last, record.checkpoint) == (1, 4, 4)
    for step, seed in ((3, 3), (4, 104)):
        assert torch.equal(record.update(step)["batch"].tokens, batch(seed=seed).tokens)
    record.refuse_changes(1, 4)
    load(half=8)
    with pytest.raises(DataError, match=r"is not what this run was trained with(.|\n)*x / 2\n.*x / 8"):
        record.refuse_changes(1, 4)
    record.close()


def test_several_updates_on_one_batch_keep_it_once(tmp_path, load):
    made = ledger(tmp_path)
    loss, one = ship(load().loss), batch(rows=64)
    for step in (1, 2, 3):
        made.train(PolicyVersion(0, step), [])
        made.update("trainer", PolicyVersion(0, step), one, loss, 0.5, {})
    one.tokens += 1  # what happens to it afterwards is not recorded
    made.close()
    size = sum(p.stat().st_size for p in (tmp_path / "ledger" / "segments").iterdir())
    assert size < 1.5 * len(packed(one))
    record = Record(tmp_path)
    assert torch.equal(record.update(3)["batch"].tokens, one.tokens - 1)
    record.close()


def test_a_run_without_updates_is_refused(tmp_path):
    made = Ledger(tmp_path / "ledger", threaded=False)
    made.resume(PolicyVersion())
    made.close()
    with pytest.raises(DataError, match="knows no trainer"):
        Record(tmp_path)
