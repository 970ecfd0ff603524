"""Staged slots: which is filled next, what a hold protects, and what is left in shared memory."""

import os
import uuid

import numpy as np
import pytest
import torch
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Staged, StagedTensor
from milkweed.transfer.slots import SHM, Slots
from milkweed.transfer.staging import open_staged
from milkweed.types import PolicyVersion


@pytest.fixture
def slots():
    made = Slots(f"mw-{uuid.uuid4().hex[:8]}-test")
    yield made
    made.close()
    assert not list(SHM.glob(f"{made._prefix}*"))


def fill(slots, step, value=None, nbytes=8192):
    """Stage one float32 tensor `w` full of `value` as version 0.step."""
    slot = slots.claim(nbytes)
    slots.begin(slot)
    slot.bytes[:nbytes].view(np.float32)[:] = step if value is None else value
    digest = xxhash.xxh3_64_intdigest(slot.bytes[:nbytes])
    tensor = StagedTensor("w", "float32", (nbytes // 4,), 0, nbytes)
    staged = Staged(PolicyVersion(0, step), str(slot.file.path), slot.offset, nbytes, digest, [tensor])
    slots.stage(slot, staged, b"")
    return staged


def test_an_engine_maps_what_was_staged(slots):
    staged = fill(slots, 7)
    weights = open_staged(staged)
    weights.verify()
    assert torch.equal(weights.tensors()["w"], torch.full((2048,), 7.0))


def test_a_write_by_an_engine_stays_its_own(slots):
    staged = fill(slots, 7)
    open_staged(staged).tensors()["w"].zero_()
    assert slots.find(PolicyVersion(0, 7)).bytes.any()


def test_held_versions_are_never_filled_again(slots):
    first = fill(slots, 1)
    slots.hold("engine0", first.version)
    for step in range(2, 6):
        fill(slots, step)  # all in the other slot
    open_staged(first).verify()
    slots.hold("engine1", PolicyVersion(0, 5))
    with pytest.raises(TransferError, match="0.1 by engine0; 0.5 by engine1"):
        slots.claim(8192)
    slots.release("engine0", first.version)
    fill(slots, 6)
    with pytest.raises(TransferError, match="overwritten"):
        open_staged(first).verify()


def test_releasing_a_dead_engine_ends_all_its_holds(slots):
    for step in (1, 2):
        fill(slots, step)
        slots.hold("engine0", PolicyVersion(0, step))
    slots.release("engine0")
    slots.release("engine0")
    assert all(not line["holders"] for line in slots.status())


def test_after_a_commit_engines_keep_only_what_they_serve(slots):
    old, new = fill(slots, 1).version, fill(slots, 2).version
    for engine in ("good", "failed", "dead"):
        slots.hold(engine, old)
        slots.hold(engine, new)
    slots.keep_only({"good": new, "elsewhere": old})
    assert not slots.find(old).holders and slots.find(new).holders == {"good"}


def test_an_engine_that_missed_an_update_keeps_nobody_from_the_next(slots):
    old, new = fill(slots, 1).version, fill(slots, 2).version
    slots.hold("missed", old)
    slots.hold("good", new)
    slots.keep_only({"good": new, "missed": old})
    assert slots.find(new).holders == {"good"}
    fill(slots, 3)
    assert slots.find(old) is None


def test_a_claim_alone_leaves_the_staged_version_whole(slots):
    fill(slots, 1)
    staged = fill(slots, 2)
    slot = slots.claim(8192)
    assert slot.staged.version == PolicyVersion(0, 1), "the oldest is filled next"
    slots.unclaim(slot)
    slots.hold("engine0", PolicyVersion(0, 1))
    open_staged(staged).verify()


def test_what_is_not_staged_cannot_be_held(slots):
    fill(slots, 1)
    with pytest.raises(TransferError, match=r"engine0 cannot hold version 0.9.*staged: 0.1"):
        slots.hold("engine0", PolicyVersion(0, 9))


def test_a_larger_version_gets_a_new_file_and_the_old_one_goes_when_released(slots):
    small = fill(slots, 1)
    slots.hold("engine0", small.version)
    large = fill(slots, 2, nbytes=1 << 16)
    assert large.path != small.path and os.path.exists(small.path)
    open_staged(small).verify()
    mapped = open_staged(small)
    slots.release("engine0", small.version)
    assert not os.path.exists(small.path)
    mapped.verify()  # a mapping outlives its file


def test_more_than_shared_memory_can_hold_is_an_error_and_leaves_no_file(slots):
    room = os.statvfs(SHM)
    with pytest.raises(TransferError, match="no room"):
        slots.claim(room.f_blocks * room.f_frsize)


def test_files_of_a_killed_puller_of_the_same_name_are_removed(slots):
    left = fill(slots, 1)
    again = Slots(slots._prefix)
    assert not os.path.exists(left.path)
    again.close()


def test_a_staged_file_that_is_gone_or_short_is_an_error():
    tensor = StagedTensor("w", "float32", (4,), 0, 16)
    gone = Staged(PolicyVersion(0, 1), f"{SHM}/mw-nowhere-{uuid.uuid4().hex}", 0, 16, 0, [tensor])
    with pytest.raises(TransferError, match="cannot be opened"):
        open_staged(gone)
