"""Faults injected for real into packed versions on their way between processes: each gives an error in time that names
the peer, or none; every reader keeps a whole version; nothing hangs, and the other side lives on."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import msgspec
import numpy as np
import pytest

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Manifest, RankManifest, join
from milkweed.transfer.packing import Packing
from milkweed.transfer.puller import GRACE_S
from milkweed.transfer.slots import SHM
from milkweed.transfer.staging import StagedImage
from milkweed.types import PolicyVersion

sys.path.insert(0, str(Path(__file__).parent))
from transfer_rank import PACKED, layout, packed_values  # noqa: E402

pytestmark = pytest.mark.stack
HERE = Path(__file__).parent
ALL = [(n, (0, 0), s) for n, s in PACKED.items()]


class Process:
    """A rank or a reader; every call has a deadline."""

    def __init__(self, script: str, *arguments: str, tcp: bool = False) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, str(HERE / script), str(theirs.fileno()), *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"UCX_TLS": "tcp"} if tcp else {})
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        self.pid = self.process.pid

    def call(self, method: str, *args, deadline_s: float = 60):
        self.send(method, *args)
        return self.answer(deadline_s)

    def send(self, method: str, *args) -> None:
        self.connection.send((method, args))

    def answer(self, deadline_s: float = 60):
        assert self.connection.poll(deadline_s), f"no answer within {deadline_s} s"
        ok, value = self.connection.recv()
        if not ok:
            raise value
        return value

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.connection.close()


class Field:
    """Two trainer ranks, and readers as a test asks for them."""

    def __init__(self, *, tcp: bool) -> None:
        self.tcp, self.step, self.token = tcp, 0, f"fault{uuid.uuid4().hex[:6]}"
        self.made: list[Process] = []
        self.ranks = [Process("transfer_rank.py", f"trainer{r}", str(r), tcp=tcp) for r in range(2)]
        for rank in self.ranks:
            rank.answer()

    def reader(self) -> Process:
        self.made.append(Process("transfer_reader.py", f"{self.token}{len(self.made)}", tcp=self.tcp))
        self.made[-1].answer()
        return self.made[-1]

    def restart(self, rank: int) -> None:
        """A successor under the same name and number."""
        self.ranks[rank].end()
        self.ranks[rank] = Process("transfer_rank.py", f"trainer{rank}", str(rank), tcp=self.tcp)
        self.ranks[rank].answer()

    def publish(self, readers=(), ttl_s: float = 60.0) -> Manifest:
        self.step += 1
        version = PolicyVersion(0, self.step)
        return join([rank.call("publish_packed", version, list(readers), ttl_s) for rank in self.ranks])

    def release(self, reader: str) -> None:
        for rank in self.ranks:
            rank.call("release", reader)

    def close(self) -> None:
        for process in (*self.ranks, *self.made):
            process.end()
        for left in SHM.glob(f"mw-{self.token}*"):  # of readers that were killed: their fleet's keeper does this
            left.unlink()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["same-host", "tcp"])
def field(request):
    made = Field(tcp=request.param)
    yield made
    made.close()


@pytest.fixture
def reader(field):
    made = field.reader()
    yield made
    made.end()


def good(outcome) -> None:
    """The pull brought exactly the version's weights."""
    staged, _ = outcome
    if isinstance(staged, TransferError):
        raise staged
    holds(staged)


def holds(staged) -> None:
    image = StagedImage(staged)
    image.check()
    truth = np.zeros(layout().nbytes, np.uint8)
    values = packed_values(staged.version.step)
    Packing(layout(), ALL).place([values[n] for n in PACKED], truth)
    assert (image._memory[staged.offset : staged.offset + staged.nbytes] == truth).all()


def failed(outcome, deadline_s: float) -> str:
    error, seconds = outcome
    assert isinstance(error, TransferError), "bytes that could not be whole were taken for a version"
    assert seconds < deadline_s + GRACE_S + 0.5
    return str(error)


def test_a_reader_killed_before_during_or_after_its_pull_keeps_nobody(field, reader):
    other = field.reader()
    for strike in (0, 2, 99):
        dying = field.reader()
        manifest = field.publish(["dying", "other"], ttl_s=1.5)
        if strike == 0:
            dying.process.kill()
        else:
            dying.call("strike", strike, signal.SIGKILL)
            dying.send("pull", manifest, 20.0)
            if strike == 99:
                good(dying.answer())
                dying.process.kill()
        assert dying.process.wait(20) == -signal.SIGKILL
        good(other.call("pull", manifest, 20.0))
        field.release("other")
        good(other.call("pull", field.publish(), 20.0))  # there is a second slot
        end = time.monotonic() + 4.0  # the dead reader's lease ends by itself
        while any("dying" in held for rank in field.ranks for held in rank.call("leases").values()):
            assert time.monotonic() < end
            time.sleep(0.1)
        good(other.call("pull", field.publish(), 20.0))


def test_a_reader_stopped_in_its_pull_takes_no_bytes_that_were_written_over(field, reader):
    good(reader.call("pull", field.publish(), 20.0, ["engine"]))
    slow = field.publish(["slow"], ttl_s=0.5)
    reader.call("strike", 1, signal.SIGSTOP)
    reader.send("pull", slow, 20.0)
    os.waitid(os.P_PID, reader.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(0.6)
    for _ in range(2):  # its lease has ended: both slots are used again
        newest = field.publish()
    os.kill(reader.pid, signal.SIGCONT)
    message = failed(reader.answer(), 20.0)
    assert "trainer rank" in message and "differ from their digest" in message
    good(reader.call("pull", newest, 20.0))


def test_a_rank_killed_while_it_publishes_costs_its_version_only(field, reader):
    old, _ = reader.call("pull", field.publish(), 20.0, ["engine"])
    field.step += 1
    version = PolicyVersion(0, field.step)
    first = field.ranks[0].call("publish_packed", version)
    field.ranks[1].send("die_while_publishing", version, 2)
    with pytest.raises((EOFError, ConnectionResetError)):
        field.ranks[1].answer()
    assert field.ranks[1].process.wait(10) == -signal.SIGKILL
    assert "the ranks bring" in failed(reader.call("pull", Manifest(version, [first]), 5.0), 5.0)
    holds(old)
    field.restart(1)
    good(reader.call("pull", field.publish(), 20.0))


@pytest.mark.slow
def test_a_rank_restarted_under_its_old_name_is_another(field, reader):
    before = field.publish()
    good(reader.call("pull", before, 20.0))
    field.restart(1)
    again = field.publish()
    assert again.ranks[1].agent != before.ranks[1].agent
    good(reader.call("pull", again, 20.0))
    stale = msgspec.structs.replace(before.ranks[1], version=again.version).sealed()
    mixed = Manifest(again.version, [again.ranks[0], stale])
    fresh = field.reader()
    assert "trainer rank 1" in failed(fresh.call("pull", mixed, 2.0), 2.0)
    good(fresh.call("pull", again, 20.0))


def test_an_engine_that_joins_late_gets_the_newest_version(field, reader):
    field.publish()
    newest = field.publish(["early"])
    late = join([rank.call("lease", "late") for rank in field.ranks])
    assert late.version == newest.version
    field.release("early")
    field.publish()  # takes the other slot
    good(reader.call("pull", late, 20.0))
    field.release("late")


def test_a_rank_that_hangs_in_the_middle_is_named_in_time_and_its_late_bytes_harm_nothing(field, reader):
    old, _ = reader.call("pull", field.publish(), 20.0, ["engine"])
    manifest = field.publish()
    rank = field.ranks[0]
    if field.tcp:
        reader.call("strike", 1, signal.SIGSTOP, rank.pid)
        message = failed(reader.call("pull", manifest, 3.0), 3.0)
    else:  # the kernel reads the memory of a stopped process; it is a newcomer's greeting that hangs
        os.kill(rank.pid, signal.SIGSTOP)
        reader = field.reader()
        message = failed(reader.call("pull", manifest, 3.0), 3.0)
    assert manifest.ranks[0].peer in message and "hung, stopped or unreachable" in message
    os.kill(rank.pid, signal.SIGCONT)
    holds(old)
    good(reader.call("pull", manifest, 20.0))
    good(reader.call("pull", field.publish(), 20.0))
    holds(old)


def test_no_flipped_bit_of_a_manifest_is_taken(field, reader):
    manifest = field.publish()
    raw = msgspec.msgpack.encode(manifest.ranks[0])
    chance = random.Random(1)
    for at in chance.sample(range(len(raw) * 8), 300):
        bits = bytearray(raw)
        bits[at // 8] ^= 1 << at % 8
        try:
            share = msgspec.msgpack.decode(bytes(bits), type=RankManifest)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if share == manifest.ranks[0]:  # another way to write the same
            continue
        with pytest.raises(TransferError):
            Manifest(manifest.version, [share, manifest.ranks[1]]).check()
    good(reader.call("pull", manifest, 20.0))


@pytest.mark.parametrize("updates", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_updates_go_on_while_readers_are_killed_at_random(field, updates):
    """Whoever lives has exactly the newest version after each update; whoever was killed comes back and catches up."""
    chance, readers, killed = random.Random(updates), [field.reader() for _ in range(2)], 0
    try:
        for _ in range(updates):
            struck = [i for i in range(2) if chance.random() < (0.25 if updates < 100 else 0.02)]
            manifest = field.publish([f"reader{i}" for i in range(2)], ttl_s=30.0)
            for i, reader in enumerate(readers):
                if i in struck:
                    reader.call("strike", chance.randint(1, 4), signal.SIGKILL)
                reader.send("pull", manifest, 20.0, ["engine"])
            for i in range(2):
                try:
                    outcome = readers[i].answer()
                except (EOFError, ConnectionResetError):
                    assert i in struck and readers[i].process.wait(10) == -signal.SIGKILL
                    killed += 1
                    readers[i].end()
                    readers[i] = field.reader()
                    outcome = readers[i].call("pull", manifest, 20.0, ["engine"])
                good(outcome)
                readers[i].call("keep_only", {"engine": manifest.version})
                field.release(f"reader{i}")
        assert killed >= updates * 0.01
    finally:
        for reader in readers:
            reader.end()
