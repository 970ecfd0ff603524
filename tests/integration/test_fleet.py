"""Fleets of real processes: failures are classified in time, and nothing outlives the controller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from milkweed.config import MeshConfig, load_mesh
from milkweed.errors import ConfigError, DeadlineExceeded, PeerDied, RemoteError, TransferError
from milkweed.fleet import Actor, Fleet, concurrent_endpoint, endpoint, processes

pytestmark = pytest.mark.stack

GONE_WITHIN_S = 5.0


class Probe(Actor):
    """Does what a test asks of it."""

    def __init__(self, mode: str = "") -> None:
        if mode == "raise":
            raise ValueError("no such model folder")
        if mode == "exit":
            print("about to leave", flush=True)
            os._exit(3)
        if mode == "hang":
            time.sleep(1000)

    @endpoint
    async def where(self) -> dict[str, str | None]:
        print("probe was asked", flush=True)
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "EXTRA")
        return {"pid": str(os.getpid())} | {n: os.environ.get(n) for n in names}

    @endpoint
    async def fail(self) -> None:
        raise TransferError("the arena is full")

    @endpoint
    async def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    @endpoint
    async def cancel(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def hang(self) -> None:
        time.sleep(1000)

    @endpoint
    async def litter(self) -> int:
        """What a crash leaves: a child in a session of its own, shared memory, a semaphore, a temporary file."""
        import multiprocessing
        import tempfile

        self.semaphore = multiprocessing.get_context("spawn").Semaphore(1)
        Path(f"/dev/shm/mw-{os.environ['MILKWEED_TOKEN']}-slot").write_bytes(b"x" * 64)
        Path(tempfile.mkdtemp(), "left").write_text("x")
        return subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True
        ).pid


class Parallel(Actor):
    @concurrent_endpoint
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


def test_a_replica_answers_fails_and_is_replaced(tmp_path: Path) -> None:
    """One fleet, every classification: answers in rank order, RemoteError, DeadlineExceeded, PeerDied, replacement."""

    async def scenario() -> None:
        async with await Fleet.start(load_mesh("local"), tmp_path) as fleet:
            pair = await fleet.spawn("trainer", 0, Probe, procs=2, env={"EXTRA": "e"}, distributed=True)
            said = await pair.call("where", deadline_s=10)
            assert [s["RANK"] for s in said] == ["0", "1"] and {s["WORLD_SIZE"] for s in said} == {"2"}
            assert (
                [int(s["pid"]) for s in said] == pair.pids
                and said[0]["EXTRA"] == "e"
                and said[0]["OMP_NUM_THREADS"] == "2"
            )
            assert (await pair.call_one("where", rank=1, deadline_s=10))["RANK"] == "1"

            with pytest.raises(
                RemoteError, match="trainer0 raised: fail raised TransferError: the arena is full"
            ) as raised:
                await pair.call_one("fail", deadline_s=10)
            assert isinstance(raised.value.__cause__, TransferError) and "monarch/_src" not in str(raised.value)
            with pytest.raises(RemoteError, match="cancelled"):
                await pair.call("cancel", deadline_s=10)
            assert len(await pair.call("where", deadline_s=10)) == 2  # it lives on

            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="trainer0 hung: hang gave no answer within 0.5 s"):
                await pair.call_one("hang", deadline_s=0.5)
            assert time.monotonic() - began < 2

            told: list[str] = []
            pair.on_failure(lambda replica: told.append(replica.name))
            pending = asyncio.ensure_future(pair.call_one("hang", rank=1, deadline_s=60))
            await asyncio.sleep(0.1)
            os.kill(pair.pids[0], signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(PeerDied, match=r"trainer0 died: process \d+ \(rank 0\) ended(.|\n)*probe was asked"):
                await pending
            assert time.monotonic() - began < 3
            await asyncio.sleep(0.1)  # the call may hear of it from Monarch, and then raises before callbacks have run
            assert told == ["trainer0"]
            with pytest.raises(PeerDied):
                await pair.call("where", deadline_s=60)
            _wait_for(lambda: not any(_alive(pid) for pid in pair.pids))  # the other rank goes with it
            await pair.stop()

            for mode, error, words in [
                (
                    "raise",
                    RemoteError,
                    "trainer0 refused: the constructor of Probe raised ValueError: no such model folder",
                ),
                ("exit", PeerDied, r"trainer0 refused: process \d+ \(rank 0\) ended(.|\n)*about to leave"),
                ("hang", DeadlineExceeded, "trainer0 refused: the constructor of Probe gave no answer"),
            ]:
                with pytest.raises(error, match=words):
                    await fleet.spawn("trainer", 0, Probe, mode, deadline_s=3 if mode == "hang" else 30)

            again = await fleet.spawn("trainer", 0, Probe)
            assert len(await again.call("where", deadline_s=10)) == 1
            naps = await fleet.spawn("rollout", 0, Parallel)
            began = time.monotonic()
            await asyncio.gather(*(naps.call_one("nap", 0.3, deadline_s=10) for _ in range(20)))
            assert time.monotonic() - began < 2
            everyone, folder = [*again.pids, *naps.pids], fleet.tmp
        assert not any(_alive(pid) for pid in everyone) and not folder.exists()
        with pytest.raises(PeerDied, match="the fleet was stopped"):
            await again.call("where", deadline_s=10)
        with pytest.raises(ConfigError, match="stopped"):
            await fleet.spawn("trainer", 0, Probe)

    asyncio.run(scenario())


def test_killed_keeper_fails_the_replicas_and_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of one host's keeper: its replicas fail as lost, its processes are swept, the other host goes on."""

    async def scenario() -> None:
        mesh = load_mesh("local", ["hosts.count=2", "rollout.replicas=2"])
        async with await Fleet.start(mesh, tmp_path) as fleet:
            first, second = await asyncio.gather(*(fleet.spawn("rollout", i, Probe) for i in range(2)))
            assert [r.host.index for r in (first, second)] == [0, 1]
            child = await first.call_one("litter", deadline_s=10)
            other = await second.call_one("litter", deadline_s=10)
            pending = asyncio.ensure_future(first.call_one("hang", deadline_s=60))
            await asyncio.sleep(1.2)  # a keeper looks at its processes once a second
            keeper = first.host._keeper
            assert keeper is not None
            keeper.kill()
            began = time.monotonic()
            with pytest.raises(PeerDied, match="rollout0 lost: host host0 is gone: its keeper process was killed"):
                await pending
            assert time.monotonic() - began < GONE_WITHIN_S
            _wait_for(lambda: not any(_alive(pid) for pid in [child, *first.pids]))
            assert _alive(other) and len(await second.call("where", deadline_s=10)) == 1
            again = await fleet.spawn("rollout", 0, Probe)
            assert again.host is not first.host and len(await again.call("where", deadline_s=10)) == 1, "its host is brought up anew"
        assert not _alive(other) and not _alive(again.pids[0]) and not _leftovers(fleet.token)

    asyncio.run(scenario())


CONTROLLER = """
import asyncio, os, sys, time
sys.path.insert(0, {tests!r})
from milkweed.config import MeshConfig
from milkweed.fleet import Fleet
from test_fleet import Probe

async def main(end):
    fleet = await Fleet.start(MeshConfig())
    replica = await fleet.spawn("trainer", 0, Probe, procs=2)
    children = await replica.call("litter", deadline_s=20)
    keepers = [h._keeper.pid for h in fleet.hosts]
    print("UP", fleet.token, *replica.pids, *children, *keepers, flush=True)
    if end == "exit":
        return
    if end == "raise":
        raise RuntimeError("a mistake in a recipe")
    await replica.call_one("hang", deadline_s=600)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["exit", "raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_controller(end: str, tmp_path: Path) -> None:
    """A controller that never calls `stop` and ends in each way: after 5 s no process (not even one in a session of
    its own), no shared memory, no temporary folder is left."""
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(tests=str(Path(__file__).parent)))
    with (tmp_path / "err").open("w") as err:
        controller = subprocess.Popen([sys.executable, str(script), end], stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        assert controller.stdout is not None
        words = controller.stdout.readline().split()
        assert words[:1] == ["UP"], (tmp_path / "err").read_text()
        token, pids = words[1], [int(w) for w in words[2:]]
        assert len(pids) == 5
        if end.startswith("SIG"):
            assert all(_alive(pid) for pid in pids) and len(_leftovers(token)) >= 3
            os.kill(controller.pid, getattr(signal, end))
        began = time.monotonic()
        controller.wait(GONE_WITHIN_S)
        _wait_for(lambda: not any(_alive(pid) for pid in pids) and not _leftovers(token), until=began + GONE_WITHIN_S)
    finally:
        controller.kill()
        controller.wait(10)


def test_leftovers_of_a_dead_run_are_swept_at_the_next_start(tmp_path: Path) -> None:
    """Controller and keeper both killed at once: the next fleet on the machine cleans up after them."""
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(tests=str(Path(__file__).parent)))
    with (tmp_path / "err").open("w") as err:
        controller = subprocess.Popen(
            [sys.executable, str(script), "wait"], stdout=subprocess.PIPE, stderr=err, text=True
        )
    assert controller.stdout is not None
    words = controller.stdout.readline().split()
    assert words[:1] == ["UP"], (tmp_path / "err").read_text()
    token, (*pids, keeper) = words[1], [int(w) for w in words[2:]]
    os.kill(controller.pid, signal.SIGSTOP)  # it must not sweep before it is killed itself
    os.kill(keeper, signal.SIGKILL)
    controller.kill()
    controller.wait(10)
    assert any(_alive(pid) for pid in pids) and _leftovers(token)

    async def scenario() -> None:
        async with await Fleet.start(MeshConfig()):
            _wait_for(lambda: not any(_alive(pid) for pid in pids) and not _leftovers(token))

    asyncio.run(scenario())


def _alive(pid: int) -> bool:
    p = processes.read(pid)
    return p is not None and p.state not in "ZX"


def _leftovers(token: str) -> list[str]:
    """The run's names in shared memory and among temporary folders."""
    import tempfile

    names = [*os.listdir("/dev/shm"), *os.listdir(tempfile.gettempdir())]
    return [n for n in names if token in n]


def _wait_for(condition: object, until: float | None = None) -> None:
    end = until or time.monotonic() + GONE_WITHIN_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.05)


def test_a_process_that_is_held_down_but_goes_on_is_slow_and_not_stopped():
    async def main() -> None:
        async with await Fleet.start(MeshConfig()) as fleet:
            replica = await fleet.spawn("reward", 0, Probe)
            work = asyncio.ensure_future(replica.call_one("compute", 9.0, deadline_s=60))
            await asyncio.sleep(0.5)
            end = time.monotonic() + 8.0
            while time.monotonic() < end:  # as a limiter of CPU does: nearly every look finds it stopped
                os.kill(replica.pids[0], signal.SIGSTOP)
                await asyncio.sleep(0.28)
                os.kill(replica.pids[0], signal.SIGCONT)
                await asyncio.sleep(0.02)
            assert replica.failure is None
            await work

    asyncio.run(main())


def test_a_stopped_process_is_found_and_ended_within_its_deadline():
    async def main() -> None:
        async with await Fleet.start(MeshConfig()) as fleet:
            replica = await fleet.spawn("reward", 0, Probe)
            found, began = asyncio.Event(), time.monotonic()
            replica.on_failure(lambda _: found.set())
            os.kill(replica.pids[0], signal.SIGSTOP)
            await asyncio.wait_for(found.wait(), 10)
            assert 3.0 < time.monotonic() - began < 8.0, "neither a moment's stop nor a long silence"
            assert replica.failure.kind == "hung" and "stopped by a signal" in str(replica.failure)
            with pytest.raises(DeadlineExceeded, match="stopped by a signal"):
                await replica.call_one("where", deadline_s=5)

    asyncio.run(main())
