"""A controller that is killed leaves its hosts and what they serve to the next; no Monarch, no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milkweed.errors import DataError, PeerDied, RemoteError
from milkweed.fleet import former, processes
from milkweed.fleet import host as host_module
from milkweed.fleet.host import Host
from milkweed.fleet.served import Served

TOKEN = "0badcafe"

SERVICE = """
import asyncio, os
from milkweed.errors import DataError
class Counter:
    def __init__(self, payload):
        self.count, self.log, self.left = int(payload), [], 0
    async def add(self, n):
        self.count += n
        return self.count
    async def pid(self):
        return os.getpid()
    async def refuse(self, raw):
        raise DataError("no " + raw.decode())
    async def hang(self):
        await asyncio.Event().wait()
    async def die(self):
        os._exit(3)
    async def gone(self):
        return self.left
    async def forsaken(self):
        self.left += 1
"""

CONTROLLER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import test_heirs as t
t.host_module.SERVE = t.WORKER
async def main():
    host, served = await t.first_life(t.Path({folder!r}))
    assert await served.call_one("add", 5, deadline_s=5) == 12
    asyncio.ensure_future(served.call_one("hang", deadline_s=60))
    print("UP", served.pids[0], host._keeper.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
WORKER = "import time; time.sleep(60)"


def fleet_of(folder: Path) -> Any:
    return SimpleNamespace(forget=lambda replica: None, tmp=folder)


def made(folder: Path, host: Host, uid: str) -> Served:
    served = Served(fleet_of(folder), "rollout", 0, uid, host, folder / "rollout0.log")
    host.on_exit = lambda name, pid, how: served.fail(served.died(f"process {pid} ended {how}"))
    return served


async def first_life(folder: Path) -> tuple[Host, Served]:
    (folder / "counter.py").write_text(SERVICE)
    (folder / "in").write_bytes(b"7")
    processes.note(folder / "owner.json", processes.me())
    host = Host(0, folder, TOKEN, folder / "host0.log", address="h0")
    env = dict(os.environ) | {processes.TOKEN_VAR: TOKEN, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    host.launch(env, 20.0)
    served = made(folder, host, "rollout0g1")
    command = [sys.executable, "-P", "-m", "milkweed.fleet.serving", str(Served.place(folder, served.uid)), "counter:Counter", str(folder / "in")]
    served.pids = [await host.start_process(served.uid, command, env | {processes.REPLICA_VAR: served.uid}, served.log)]
    host.watch(served.uid, served.pids)
    await served.connect(Served.place(folder, served.uid), TOKEN, 20)
    return host, served


@pytest.fixture
def killed(tmp_path: Path):
    """The folder of a fleet whose controller was killed, the served process and the keeper."""
    folder = Path("/tmp") / f"heirs-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    folder.mkdir(mode=0o700)
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(tests=str(Path(__file__).parent), folder=str(folder)))
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    controller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    assert controller.stdout is not None
    words = controller.stdout.readline().split()
    assert words[:1] == ["UP"], words
    pid, keeper = map(int, words[1:])
    controller.kill()
    controller.wait(10)
    yield folder, pid, keeper
    former.end(former.Former(TOKEN, folder, 20.0))
    assert not processes.lives(pid) and not processes.lives(keeper) and not folder.exists()


def test_the_next_controller_takes_over_what_the_killed_one_served(killed, monkeypatch):
    folder, pid, keeper = killed
    monkeypatch.setattr(host_module, "SERVE", WORKER)

    async def heir() -> None:
        env = dict(os.environ) | {processes.TOKEN_VAR: TOKEN}
        stranger = Host(0, folder, "feedface", folder / "host0.log", address="h0-1")
        with pytest.raises(PeerDied, match="refuses this one's token"):
            await asyncio.to_thread(stranger.adopt, env)
        host = Host(0, folder, TOKEN, folder / "host0.log", address="h0-2")
        kept = await asyncio.to_thread(host.adopt, env)
        assert kept == {"rollout0g1": pid} and host._keeper is not None and host._keeper.pid == keeper
        served = made(folder, host, "rollout0g1")
        served.pids = [pid]
        host.watch(served.uid, served.pids)
        await served.connect(Served.place(folder, served.uid), TOKEN, 5)
        assert await served.call_one("add", 1, deadline_s=5) == 13, "it is the same object"
        assert await served.call("pid", deadline_s=5) == [pid] and await served.call_one("gone", deadline_s=5) == 1
        with pytest.raises(RemoteError, match="no seven") as raised:
            await served.call_one("refuse", b"seven", deadline_s=5)
        assert isinstance(raised.value.__cause__, DataError) and served.failure is None
        with pytest.raises(PeerDied, match="with status 3; its log"):
            await served.call_one("die", deadline_s=5)
        await asyncio.to_thread(host.stop)
        assert not processes.lives(keeper) and not folder.exists()

    asyncio.run(heir())


def test_nobody_who_comes_too_late_finds_anything(tmp_path):
    """Orphans of a former life whose grace is over, or which has none, are gone or ended."""
    assert former.former(tmp_path) is None
    gone = tmp_path / "gone"
    former.remember(tmp_path, "deadbeef", gone, 5.0)
    assert former.former(tmp_path) is None, "nothing is left of it"
    gone.mkdir()
    processes.note(gone / "owner.json", processes.me())
    assert former.former(tmp_path) is None, "it lives"
    processes.note(gone / "owner.json", {"pid": os.getpid(), "started": 1})
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=dict(os.environ) | {processes.TOKEN_VAR: "deadbeef"})
    time.sleep(0.1)
    life = former.former(tmp_path)
    assert life is not None and life.keepers == []
    assert former.end(life) == 1 and orphan.wait(5) == -signal.SIGKILL and not gone.exists()
    former.forget(tmp_path)
    assert not (tmp_path / former.NOTE).exists()


def test_a_keeper_that_nobody_comes_to_ends_what_it_kept(killed):
    folder, pid, keeper = killed
    until = time.monotonic() + 5
    while not (folder / "adopt-host0").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert processes.lives(pid) and json.loads((folder / "keeper-host0.json").read_text())["pid"] == keeper
    os.kill(keeper, signal.SIGTERM)
    while folder.exists():
        assert time.monotonic() < until + 5
        time.sleep(0.05)
    assert not processes.lives(pid)




def test_a_signal_to_a_keeper_is_a_notice_and_a_second_one_its_end(monkeypatch):
    monkeypatch.setattr(host_module, "SERVE", WORKER)

    async def noticed() -> None:
        folder = Path("/tmp") / f"heirs-{os.getpid()}-n"
        folder.mkdir(mode=0o700)
        host, served = await first_life(folder)
        heard: list[Host] = []
        host.on_notice = heard.append
        os.kill(host._keeper.pid, signal.SIGTERM)
        until = time.monotonic() + 5
        while not heard and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert heard == [host] and host.noticed and await served.call_one("add", 1, deadline_s=5) == 8, "it goes on"
        os.kill(host._keeper.pid, signal.SIGTERM)
        while folder.exists() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert not folder.exists() and not processes.lives(served.pids[0])
        await served.stop()

    asyncio.run(noticed())
