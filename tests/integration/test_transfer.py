"""Weights between real processes over NIXL: right, whole, and safe when a peer is dead, hung, slow or altered."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import msgspec
import pytest
import torch

from milkweed.config import load_mesh
from milkweed.errors import RemoteError, TransferError
from milkweed.fleet import Fleet
from milkweed.transfer import puller as puller_module
from milkweed.transfer.manifest import join
from milkweed.transfer.probe import measure
from milkweed.transfer.puller import GRACE_S, Puller
from milkweed.transfer.puller_actor import PullerActor
from milkweed.transfer.slots import SHM
from milkweed.transfer.staging import open_staged
from milkweed.types import PolicyVersion

sys.path.insert(0, str(Path(__file__).parent))
from transfer_rank import weights  # noqa: E402

pytestmark = pytest.mark.stack
_RANK = Path(__file__).with_name("transfer_rank.py")


class RankProcess:
    """A publisher in a process of its own; every call has a deadline."""

    def __init__(self, name: str, rank: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, str(_RANK), str(theirs.fileno()), name, str(rank)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"})
        theirs.close()

    def ready(self) -> "RankProcess":
        self._answer(60)
        return self

    def call(self, method: str, *args, deadline_s: float = 60):
        self.connection.send((method, args))
        return self._answer(deadline_s)

    def _answer(self, deadline_s: float):
        assert self.connection.poll(deadline_s), f"no answer from the rank within {deadline_s} s"
        ok, value = self.connection.recv()
        if not ok:
            raise value
        return value

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.connection.close()


class Versions:
    """Fresh version numbers; the seed of a version's weights is its step."""

    step = 0

    @classmethod
    def next(cls) -> PolicyVersion:
        cls.step += 1
        return PolicyVersion(0, cls.step)


@pytest.fixture(scope="module")
def ranks():
    both = [RankProcess(f"trainer{i}", i) for i in range(2)]
    yield [rank.ready() for rank in both]
    for rank in both:
        rank.end()


@pytest.fixture
def extra_rank():
    """A rank that a test may stop or kill."""
    made = []

    def start(name="trainer9", rank=0):
        made.append(RankProcess(name, rank).ready())
        return made[-1]

    yield start
    for rank in made:
        rank.end()


@pytest.fixture(scope="module")
def puller():
    made = Puller(f"test{uuid.uuid4().hex[:6]}")
    yield made
    made.close()
    assert not list(SHM.glob(f"{made._slots._prefix}*"))


def pull(puller, manifest, deadline_s=60.0, holders=()):
    return asyncio.run(puller.pull(manifest, deadline_s, holders))


def assert_whole(staged, dtype=None):
    """What an engine would map is bitwise the version's weights."""
    view = open_staged(staged)
    view.verify()
    found, wanted = view.tensors(), weights(staged.version.step)
    assert list(found) == sorted(wanted)
    for name, tensor in wanted.items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def failing_pull(puller, manifest, deadline_s):
    """The error of a pull that must fail in time."""
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        pull(puller, manifest, deadline_s)
    assert time.monotonic() - began < deadline_s + GRACE_S + 0.5
    return str(caught.value)


def test_every_version_arrives_bitwise_through_both_slots(ranks, puller):
    for _ in range(3):
        manifest = join([ranks[0].call("publish", Versions.next(), "whole", ["host0"])])
        assert_whole(pull(puller, manifest))
        ranks[0].call("release", "host0", manifest.version)


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_shards_of_two_ranks_become_full_tensors(ranks, puller, how):
    version = Versions.next()
    manifest = join([rank.call("publish", version, how) for rank in ranks])
    assert_whole(pull(puller, manifest))


def test_a_version_can_be_sent_as_bfloat16(ranks, puller):
    manifest = join([ranks[0].call("publish", Versions.next(), "whole", [], 60.0, "bfloat16")])
    assert_whole(pull(puller, manifest), torch.bfloat16)


def test_a_version_already_here_is_not_read_again(ranks, puller):
    manifest = join([ranks[0].call("publish", Versions.next(), "whole")])
    first = pull(puller, manifest)
    assert pull(puller, manifest, 0.5) == first


def test_ranks_that_leave_a_gap_or_overlap_are_refused_by_tensor(ranks, puller):
    version = Versions.next()
    half = ranks[1].call("publish", version, "fsdp")
    assert "elements [0:2050, 0:1024]" in failing_pull(puller, join([half]), 10)
    whole = ranks[0].call("publish", version, "whole")
    assert "tensor embed" in failing_pull(puller, join([whole, half]), 10)


def test_a_leased_slot_is_never_overwritten(ranks, puller):
    first = join([ranks[0].call("publish", Versions.next(), "whole", ["host0"])])
    second = ranks[0].call("publish", Versions.next(), "whole", ["host0", "host1"])
    with pytest.raises(TransferError) as caught:
        ranks[0].call("publish", Versions.next(), "whole")
    assert f"{first.version} by host0" in str(caught.value) and f"{second.version} by host0, host1" in str(caught.value)
    assert_whole(pull(puller, first))
    ranks[0].call("release", "host0", first.version)
    third = join([ranks[0].call("publish", Versions.next(), "whole")])
    assert_whole(pull(puller, join([second])))
    assert_whole(pull(puller, third))
    ranks[0].call("release", "host0")
    ranks[0].call("release", "host1")
    assert not any(ranks[0].call("leases").values())


def test_a_dead_readers_lease_ends_by_itself(ranks):
    for _ in range(2):
        ranks[0].call("publish", Versions.next(), "whole", ["dead"], 0.2)
    time.sleep(0.3)
    ranks[0].call("publish", Versions.next(), "whole")


def test_a_late_engine_can_lease_the_newest_version(ranks, puller):
    version = Versions.next()
    ranks[0].call("publish", version, "whole")
    late = join([ranks[0].call("lease", "late")])
    assert late.version == version
    ranks[0].call("publish", Versions.next(), "whole")
    assert_whole(pull(puller, late))
    ranks[0].call("release", "late")


def test_a_source_overwritten_while_it_is_read_is_refused_and_the_old_version_untouched(ranks, puller):
    old = pull(puller, join([ranks[0].call("publish", Versions.next(), "whole")]), holders=["engine0"])
    slow = join([ranks[0].call("publish", Versions.next(), "whole", ["slow"], 0.0)])
    for _ in range(2):  # its lease ended too soon: both slots are used again
        ranks[0].call("publish", Versions.next(), "whole")
    message = failing_pull(puller, slow, 20)
    assert "trainer rank 0" in message and "bytes differ from their digest" in message
    racing = join([ranks[0].call("publish", Versions.next(), "whole")])
    ranks[0].call("publish_forever", racing.version, 2.0)
    assert "bytes differ from their digest" in failing_pull(puller, racing, 20)
    time.sleep(2.2)
    assert_whole(old)
    fresh = join([ranks[0].call("publish", Versions.next(), "whole")])
    assert_whole(pull(puller, fresh))
    assert_whole(old)
    puller.release("engine0", old.version)


def test_versions_that_engines_hold_are_never_overwritten(ranks, puller):
    manifests = (join([ranks[0].call("publish", Versions.next(), "whole")]) for _ in range(2))
    held = [pull(puller, manifest, holders=[f"e{i}"]) for i, manifest in enumerate(manifests)]
    third = join([ranks[0].call("publish", Versions.next(), "whole")])
    message = failing_pull(puller, third, 20)
    assert f"{held[0].version} by e0" in message and f"{held[1].version} by e1" in message
    for staged in held:
        assert_whole(staged)
    puller.release("e0")
    assert_whole(pull(puller, third))
    assert_whole(held[1])
    puller.release("e1")


def test_flipped_bits_in_a_manifest_are_refused(ranks, puller):
    good = ranks[0].call("publish", Versions.next(), "whole")
    for at in (10, 200, len(good.metadata) - 5):
        bits = bytearray(good.metadata)
        bits[at] ^= 1
        bad = msgspec.structs.replace(good, metadata=bytes(bits))
        whole = msgspec.structs.replace(join([good]), ranks=[bad])
        assert "trainer rank 0" in failing_pull(puller, whole, 10)
    assert_whole(pull(puller, join([good])))


def test_a_killed_rank_fails_the_pull_by_name_and_its_successor_serves(ranks, puller, extra_rank):
    old = pull(puller, join([ranks[0].call("publish", Versions.next(), "whole")]), holders=["engine0"])
    rank = extra_rank("trainer9")
    known = join([rank.call("publish", Versions.next(), "whole")])
    pull(puller, known)
    manifest = join([rank.call("publish", Versions.next(), "whole")])
    rank.signal(signal.SIGKILL)
    rank.process.wait(10)
    assert manifest.ranks[0].peer in failing_pull(puller, manifest, 20)
    assert manifest.ranks[0].peer in failing_pull(puller, manifest, 20)  # also an agent that never knew it
    assert_whole(old)
    again = extra_rank("trainer9")
    assert_whole(pull(puller, join([again.call("publish", Versions.next(), "whole")])))
    puller.release("engine0")


def test_a_stopped_rank_fails_the_pull_in_time_and_is_read_when_it_goes_on(puller, extra_rank):
    rank = extra_rank("trainer8")
    manifest = join([rank.call("publish", Versions.next(), "whole")])
    rank.signal(signal.SIGSTOP)
    message = failing_pull(puller, manifest, 2.0)
    assert manifest.ranks[0].peer in message and "hung, stopped or unreachable" in message
    rank.signal(signal.SIGCONT)
    assert_whole(pull(puller, manifest))


def test_a_pull_that_never_returns_is_given_up_and_the_next_one_works(ranks, puller, monkeypatch):
    manifest = join([ranks[0].call("publish", Versions.next(), "whole")])
    read, hanging = puller_module.read_tensors, threading.Event()

    def hang(attempt, session, starts):
        hanging.wait(60)
        read(attempt, session, starts)

    monkeypatch.setattr(puller_module, "read_tensors", hang)
    assert manifest.ranks[0].peer in failing_pull(puller, manifest, 0.5)
    monkeypatch.setattr(puller_module, "read_tensors", read)
    assert puller.status()["quarantined"] == 1
    assert_whole(pull(puller, manifest))
    hanging.set()
    end = time.monotonic() + 10
    while puller.status()["quarantined"] and time.monotonic() < end:
        time.sleep(0.05)
    assert puller.status()["quarantined"] == 0
    assert_whole(pull(puller, manifest))


def test_a_pull_given_up_while_it_allocates_is_waited_for_and_loses_nothing(ranks, puller, monkeypatch):
    manifest = join([ranks[0].call("publish", Versions.next(), "whole")])
    opening = Puller._open_session

    def slowly(self, nbytes):
        time.sleep(2.5)
        return opening(self, nbytes)

    async def twice():
        with pytest.raises(TransferError, match="within 0.3 s"):
            await puller.pull(manifest, 0.3)
        monkeypatch.setattr(Puller, "_open_session", opening)
        with pytest.raises(TransferError, match="an earlier pull still allocates"):
            await puller.pull(manifest, 0.3)
        return await puller.pull(manifest, 30.0)

    monkeypatch.setattr(Puller, "_open_session", slowly)
    session = puller._session
    assert_whole(asyncio.run(twice()))
    assert puller._session is session is not None and puller.status()["quarantined"] == 0


async def _through_an_actor(manifest):
    async with await Fleet.start(load_mesh("local")) as fleet:
        puller = await fleet.spawn("puller", 0, PullerActor, fleet.token, "actor")
        staged = await puller.call_one("pull", manifest, 50.0, ["engine0"], deadline_s=60)
        assert_whole(staged)
        with pytest.raises(RemoteError, match="cannot hold version 9.9"):
            await puller.call_one("hold", "engine1", PolicyVersion(9, 9), deadline_s=60)
        status = await puller.call_one("status", deadline_s=60)
        assert [slot["holders"] for slot in status["slots"] if slot["version"]] == [["engine0"]]
        await puller.call_one("release", "engine0", deadline_s=60)
        await puller.call_one("close", deadline_s=60)
        assert not os.path.exists(staged.path)


def test_a_puller_works_as_a_monarch_actor(ranks):
    asyncio.run(_through_an_actor(join([ranks[0].call("publish", Versions.next(), "whole")])))


def test_the_probe_measures_this_host_and_leaves_nothing():
    probe = measure(nbytes=16 << 20, repeats=2, deadline_s=60)
    assert probe.backends == ["UCX"] and probe.memcpy_gb_s > 0 and probe.nixl_gb_s > 0 and (probe.shm_gb_s or 0) > 0
    with pytest.raises(TransferError, match="within 0.2 s"):
        measure(deadline_s=0.2)
    time.sleep(1)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert not any("milkweed.transfer.probe" in command for command in commands)


def test_idle_agents_cost_at_most_three_hundredths_of_a_core(ranks, puller):
    began = time.process_time()
    theirs = ranks[0].call("cpu", 4.0)
    assert theirs <= 0.03
    assert (time.process_time() - began) / 4.0 <= 0.03
