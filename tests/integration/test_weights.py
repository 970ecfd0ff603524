"""Packed versions on their way to a host: read by NIXL, taken from another host, sent as messages, or put there by the
trainer itself; only what changed is moved, and whatever fails leaves what was staged before."""

from __future__ import annotations

import asyncio
import uuid

import msgspec
import numpy as np
import pytest
import torch

from milkweed.errors import TransferError
from milkweed.rollout.images import ParameterImage
from milkweed.transfer.copying import copy
from milkweed.transfer.manifest import Manifest, Staged, join
from milkweed.transfer.packing import GrantedSlots, Packing
from milkweed.transfer.plan import EngineLayout, Parameter, Piece, RankLayout
from milkweed.transfer.publisher import Publisher
from milkweed.transfer.puller import Puller
from milkweed.types import PolicyVersion

pytestmark = pytest.mark.stack
ROWS, COLUMNS = 1024, 4096


def layout() -> EngineLayout:
    """Two engine ranks: `a` cut by rows, `b` by columns, `c` held by both; about 50 MB in all."""
    shapes = {"a": (ROWS, COLUMNS), "b": (ROWS, COLUMNS), "c": (ROWS, COLUMNS)}
    ranks = []
    for r in range(2):
        half = ROWS * COLUMNS * 2
        table = [
            Parameter("a", "float32", (ROWS // 2, COLUMNS), 0, half),
            Parameter("b", "float32", (ROWS, COLUMNS // 2), half, half),
            Parameter("c", "float32", (ROWS, COLUMNS), 2 * half, 2 * half),
        ]
        pieces = [
            Piece("a", (r * ROWS // 2, 0), (ROWS // 2, COLUMNS), 0, 0, (COLUMNS, 1)),
            Piece("b", (0, r * COLUMNS // 2), (ROWS, COLUMNS // 2), 1, 0, (COLUMNS // 2, 1)),
            Piece("c", (0, 0), (ROWS, COLUMNS), 2, 0, (COLUMNS, 1)),
        ]
        ranks.append(RankLayout(table, pieces, 4 * half))
    return EngineLayout(shapes, ranks)


class Plane:
    """Two trainer ranks (each has half of the columns of everything) and the pullers of two hosts, in one process."""

    def __init__(self) -> None:
        self.layout = layout()
        self.values = {n: torch.randn(s) for n, s in self.layout.tensors.items()}
        half = COLUMNS // 2
        self.boxes = [[(n, (0, r * half), (ROWS, half)) for n in "abc"] for r in range(2)]
        self.packings = [Packing(self.layout, b) for b in self.boxes]
        self.publishers = [Publisher(f"trainer{r}", r) for r in range(2)]
        token = uuid.uuid4().hex[:8]
        self.pullers = [Puller(token, f"puller{i}") for i in range(2)]
        self.engines = [{p.name: torch.zeros(p.shape) for p in r.parameters} for r in self.layout.ranks]
        self.images = [ParameterImage(self.layout, r, e) for r, e in enumerate(self.engines)]

    def close(self) -> None:
        for each in (*self.pullers, *self.publishers):
            each.close()

    def held(self, rank: int) -> list[torch.Tensor]:
        half = COLUMNS // 2
        return [self.values[n][:, rank * half : (rank + 1) * half].contiguous() for n in "abc"]

    def publish(self, step: int) -> Manifest:
        version = PolicyVersion(0, step)
        return join([p.publish_packed(version, k, self.held(r), []) for r, (p, k) in enumerate(zip(self.publishers, self.packings))])

    def pull(self, manifest: Manifest, host: int = 0) -> Staged:
        return asyncio.run(self.pullers[host].pull(manifest, 60.0, ["engine"]))

    def commit(self, staged: Staged, changed_only: bool = False) -> None:
        class Model:
            def __init__(self, parameters):
                self._parameters = parameters

            def named_parameters(self, remove_duplicate=True):
                return self._parameters.items()

        for engine, image in zip(self.engines, self.images):
            opened = image.check(staged, Model(engine))
            filling = image.filling(opened, staged.ranges if changed_only else None)
            copy(job for jobs in filling.parts() for job in jobs)
            filling.check()

    def use(self, dtype: str) -> None:
        """Send in that dtype."""
        self.packings = [Packing(self.layout, b, dtype) for b in self.boxes]

    def serves_the_trainers_weights(self, dtype: str = "") -> bool:
        a, b, c = (self.values[n].to(getattr(torch, dtype or "float32")).float() for n in "abc")
        want = [
            {"a": a[: ROWS // 2], "b": b[:, : COLUMNS // 2], "c": c},
            {"a": a[ROWS // 2 :], "b": b[:, COLUMNS // 2 :], "c": c},
        ]
        return all(torch.equal(e[n], w[n]) for e, w in zip(self.engines, want) for n in w)


@pytest.fixture
def plane():
    torch.set_num_threads(1)
    made = Plane()
    yield made
    made.close()


def test_what_was_packed_is_what_engines_copy(plane):
    plane.commit(plane.pull(plane.publish(1)))
    assert plane.serves_the_trainers_weights()


def blocks(manifest: Manifest) -> list[int]:
    return [chunk.digest for rank in manifest.ranks for chunk in rank.chunks]


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_an_update_of_two_percent_of_the_blocks_moves_and_commits_as_little(plane, dtype):
    plane.use(dtype)
    for step in (1, 2):  # a full one in each slot
        manifest = plane.publish(step)
        staged = plane.pull(manifest)
        plane.pullers[0].keep_only({"engine": staged.version})
    plane.commit(staged)
    for step in range(3, 9):
        before = blocks(manifest)
        name, row, column = ("a", "b")[step % 2], step * 100, (5, COLUMNS - 3)[step % 3 == 0]
        plane.values[name][row, column] += 1.0
        manifest = plane.publish(step)
        changed = sum(x != y for x, y in zip(before, blocks(manifest), strict=True))
        assert 0 < changed <= 0.02 * len(before) * (2 if dtype else 1)  # half as many blocks when half is sent
        staged = plane.pull(manifest)
        # what the free slot has, two versions old, is brought up to date: from here, where the other slot has it
        assert 0 < plane.pullers[0].status()["last"]["moved"] <= 0.05 * manifest.nbytes
        assert staged.base == PolicyVersion(0, step - 1) and staged.ranges
        assert sum(n for _, n in staged.ranges) <= 0.05 * plane.layout.nbytes
        plane.commit(staged, changed_only=True)
        plane.pullers[0].keep_only({"engine": staged.version})
        assert plane.serves_the_trainers_weights(dtype)


def test_a_chain_that_broke_is_sent_and_committed_whole(plane):
    plane.commit(plane.pull(plane.publish(1)))
    plane.values["a"][7, 5] += 1.0
    fresh = Puller(uuid.uuid4().hex[:8], "late")  # has no version before
    try:
        manifest = plane.publish(2)
        staged = asyncio.run(fresh.pull(manifest, 60.0, ["engine"]))
        assert staged.ranges is None and fresh.status()["last"]["moved"] >= plane.layout.payload
        plane.commit(staged)
        assert plane.serves_the_trainers_weights()
    finally:
        fresh.close()


def test_a_host_hands_a_version_on(plane):
    for step in (1, 2):
        plane.values["b"].add_(1.0)
        first = plane.pull(plane.publish(step))
        offer = plane.pullers[0].offer(first.version, "relay to puller1")
        second = plane.pull(Manifest(first.version, [offer]), host=1)
        plane.pullers[0].release("relay to puller1", first.version)
        plane.commit(second)
        assert plane.serves_the_trainers_weights()
        for puller in plane.pullers:
            puller.keep_only({"engine": first.version})


def test_messages_are_enough(plane):
    manifest, puller = plane.publish(1), plane.pullers[0]
    wanted = puller.expect(manifest)
    assert len(wanted) == sum(len(r.chunks) for r in manifest.ranks)
    rank, number = wanted[0]
    data = plane.publishers[rank].chunk(manifest.version, number)
    with pytest.raises(TransferError, match="differs from its digest"):
        puller.receive(rank, number, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TransferError, match="have not arrived"):
        puller.complete()
    for rank, number in wanted:
        puller.receive(rank, number, plane.publishers[rank].chunk(manifest.version, number))
    plane.commit(puller.complete(["engine"]))
    assert plane.serves_the_trainers_weights()


def place(plane, step: int) -> Staged:
    """As the trainer's ranks and the controller do on one host."""
    puller, version = plane.pullers[0], PolicyVersion(0, step)
    grant = puller.grant(plane.layout.nbytes, "here")
    for rank, packing in enumerate(plane.packings):
        packing.place(plane.held(rank), GrantedSlots().open(grant))
    staged = Staged(
        version, grant.path, grant.offset, grant.nbytes, 0, [], layout=plane.layout.digest(), stamp=grant.stamp
    )
    puller.stage(staged, ["engine"])
    return staged


def test_a_trainer_on_the_same_host_fills_the_slot_itself(plane):
    for step in (1, 2, 3):
        plane.values["a"].mul_(2.0)
        plane.commit(place(plane, step))
        assert plane.serves_the_trainers_weights()
        plane.pullers[0].keep_only({"engine": PolicyVersion(0, step)})


def test_who_was_given_up_can_fill_nothing(plane):
    puller = plane.pullers[0]
    staged = place(plane, 1)
    late = puller.grant(plane.layout.nbytes, "here")
    memory = GrantedSlots().open(late)
    puller.revoke()
    with pytest.raises(TransferError, match="given to somebody else"):
        GrantedSlots().open(late)
    with pytest.raises(TransferError, match="grant has ended"):
        puller.stage(msgspec.structs.replace(staged, version=PolicyVersion(0, 2), stamp=late.stamp))
    again = place(plane, 2)
    memory[:] = 255  # it writes after all: into a file that is nobody's any more
    plane.commit(again)
    assert plane.serves_the_trainers_weights()


def test_bytes_that_differ_from_their_digest_leave_the_old_version(plane):
    staged = plane.pull(plane.publish(1))
    plane.commit(staged)
    manifest = plane.publish(2)
    share = manifest.ranks[1]
    wrong = [msgspec.structs.replace(share.chunks[0], digest=1), *share.chunks[1:]]
    altered = Manifest(manifest.version, [manifest.ranks[0], msgspec.structs.replace(share, chunks=wrong).sealed()])
    with pytest.raises(TransferError, match="version 0.2 from trainer rank 1.*differ from their digest"):
        plane.pull(altered)
    plane.commit(plane.pullers[0].hold("engine", staged.version))
    assert plane.serves_the_trainers_weights()
    plane.values["c"].add_(1.0)
    plane.commit(plane.pull(plane.publish(3)))
    assert plane.serves_the_trainers_weights()


@pytest.mark.parametrize("flip", ["to", "payload", "nbytes"])
def test_an_altered_manifest_is_refused_by_name(plane, flip):
    manifest = plane.publish(1)
    share = manifest.ranks[0]
    if flip == "to":
        first = msgspec.structs.replace(share.regions[0], to=share.regions[0].to + 64)
        bad = msgspec.structs.replace(share, regions=[first, *share.regions[1:]])
    else:
        bad = msgspec.structs.replace(share, **{flip: getattr(share, flip) + 1})
    with pytest.raises(TransferError, match="trainer rank 0.*altered on the way"):
        plane.pull(Manifest(manifest.version, [bad, manifest.ranks[1]]))


def test_ranks_that_bring_too_little_are_refused(plane):
    manifest = plane.publish(1)
    with pytest.raises(TransferError, match="the ranks bring"):
        plane.pull(Manifest(manifest.version, manifest.ranks[:1]))


def test_an_overwritten_version_is_never_committed(plane):
    staged = plane.pull(plane.publish(1))
    plane.pullers[0].release("engine")
    for step in (2, 3):
        plane.values["a"].add_(1.0)
        plane.pull(plane.publish(step))
        plane.pullers[0].keep_only({})
    with pytest.raises(TransferError, match="0.1 .* was overwritten"):
        plane.commit(staged)
    assert not any(e["a"].any() for e in plane.engines)


def test_bfloat16_on_the_way_is_the_cast_of_what_was_sent(plane):
    plane.use("bfloat16")
    plane.commit(plane.pull(plane.publish(1)))
    assert plane.serves_the_trainers_weights("bfloat16")
    assert np.isclose(plane.publish(2).nbytes, plane.layout.payload / 2, rtol=0.01)
