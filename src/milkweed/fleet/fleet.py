"""A fleet: the hosts of a mesh, brought up and taken down, and the replicas that run on them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from milkweed.config import MeshConfig
from milkweed.errors import ConfigError, DeadlineExceeded, FleetError, PeerDied, no_room
from milkweed.fleet import credentials, former, loopback, monarch_compat, processes
from milkweed.fleet.agent import Agent
from milkweed.fleet.host import Host
from milkweed.fleet.replica import Replica
from milkweed.fleet.served import Served

HOST_DEADLINE_S = 60.0


class Fleet:
    """Live hosts with replicas on them. `async with await Fleet.start(mesh) as fleet: ...`

    `token` names this fleet on its machines: its shared memory is `/dev/shm/mw-TOKEN-*`, its temporary folder (`tmp`,
    gone when it stops) is `milkweed-TOKEN`. However the controller ends, everything is gone within 5 seconds; where the mesh
    has `hosts.orphan_grace_s`, a controller that was killed leaves what `serve` started to the next one of its run directory.
    """

    def __init__(self, mesh: MeshConfig, run_dir: Path | None) -> None:
        self.mesh, self.run_dir = mesh, run_dir
        self.token = secrets.token_hex(4)
        self.tmp = processes.base() / f"{processes.FOLDER_PREFIX}{self.token}"
        self.logs = self.tmp / "logs" if run_dir is None else Path(run_dir).resolve() / "logs"
        self.hosts: list[Host] = []
        self.replicas: list[Replica] = []
        self._by_uid: dict[str, Replica] = {}
        self._count = 0
        self._gone: list[Host] = []
        self._renewing = asyncio.Lock()
        self._stopped = False
        self._ticker: asyncio.Task[None] | None = None
        self._log_lock = threading.Lock()
        self.kept: dict[str, tuple[Host, int]] = {}
        """What a former life has left, by uid: its host and first process. `serve` takes what it can use."""
        self.on_notice: Callable[[Host], None] = lambda host: None
        """Hears, in a thread of the host's, that a signal to its keeper says it is about to be taken away."""
        self.said: list[str] = []
        """What the start has to tell: what is open to whom, and what became of a former life."""

    @classmethod
    async def start(cls, mesh: MeshConfig, run_dir: Path | str | None = None) -> Fleet:
        """Bring the hosts up. Logs go to `run_dir/logs`, or to a folder that is removed at `stop`.

        Raises ConfigError, or PeerDied or DeadlineExceeded of kind `refused` if a host does not come up.
        """
        monarch_compat.check_version()
        fleet = cls(mesh, None if run_dir is None else Path(run_dir))
        fleet.said += loopback.opened(os.environ)
        inherits = False
        if run_dir is not None:
            inherits = await fleet._settle_former()
        await asyncio.to_thread(processes.sweep_dead_runs)
        fleet.tmp.mkdir(mode=0o700, exist_ok=inherits)
        processes.note(fleet.tmp / "owner.json", processes.me())
        try:
            fleet.logs.mkdir(parents=True, exist_ok=True)
            if run_dir is not None:
                former.remember(fleet.logs, fleet.token, fleet.tmp, mesh.hosts.orphan_grace_s)
            monarch_compat.hear_faults(fleet.heard)
            monarch_compat.open_context(fleet.tmp)
            for index in range(mesh.hosts.count):
                fleet.hosts.append((await fleet._adopt(index) if inherits else None) or fleet._launch(index))
            if inherits:
                await asyncio.to_thread(former.end_hosts, fleet.tmp, {h.name for h in fleet.hosts})
                await asyncio.to_thread(processes.remove_unmapped, fleet.token)
            await asyncio.gather(*(h.attach(HOST_DEADLINE_S) for h in fleet.hosts))
        except BaseException:
            await fleet.stop()
            raise
        if "ipykernel" in sys.modules:
            # a kernel delivers an interrupt to an awaiting cell only when its loop turns
            fleet._ticker = asyncio.get_running_loop().create_task(_tick())
        return fleet

    async def spawn(
        self,
        role: str,
        index: int,
        actor_class: type,
        *args: Any,
        procs: int = 1,
        env: dict[str, str] | None = None,
        host: int | None = None,
        distributed: bool = False,
        deadline_s: float = 120.0,
    ) -> Replica:
        """Start a replica: `procs` processes on one host, each with `actor_class(*args)`; returns when all are up.

        Where it runs, its threads and its GPUs are the mesh's choice for `role` and `index` unless `host` or `env`
        say otherwise. `distributed` sets what `torch.distributed` reads from the environment. Raises RemoteError if
        the constructor raised, PeerDied if a process died, DeadlineExceeded after `deadline_s`; kind `refused`. What
        had started is gone then.
        """
        if self._stopped:
            raise ConfigError("the fleet has been stopped; start another with Fleet.start")
        place = self.mesh.place(role, index)
        where = await self._living(f"{role}{index}", place.host if host is None else host, bound=host is not None or not place.cpu)
        self._count += 1
        uid = f"{role}{index}g{self._count}"
        replica = Replica(self, role, index, uid, where, self.logs / f"{role}{index}.log")
        self._by_uid[uid] = replica
        end = time.monotonic() + deadline_s
        try:
            await self._bring_up(
                replica,
                actor_class,
                args,
                procs,
                place.environment(os.environ.get("CUDA_VISIBLE_DEVICES")) | (env or {}),
                distributed,
                end,
            )
        except FleetError as error:
            await replica.stop()
            lines = f"\n{replica.last_lines()}" if isinstance(error, DeadlineExceeded) else ""
            raise type(error)(replica.name, "refused", error.cause + lines) from error.__cause__
        except BaseException:
            await replica.stop()
            raise
        self.replicas.append(replica)
        return replica

    async def serve(
        self, role: str, index: int, target: str, payload: bytes, *, env: dict[str, str] | None = None, deadline_s: float = 120.0
    ) -> Served:
        """Start a replica of one process that serves `target` (`module:Class`) made of `payload` over a socket, or take the
        same one of a former life. Unlike those of `spawn` it outlives a controller that is killed, for as long as the
        mesh's `hosts.orphan_grace_s` says. Raises as `spawn`."""
        if self._stopped:
            raise ConfigError("the fleet has been stopped; start another with Fleet.start")
        place = self.mesh.place(role, index)
        own = place.environment(os.environ.get("CUDA_VISIBLE_DEVICES")) | (env or {})
        made = hashlib.sha256(repr((target, payload, sorted(own.items()))).encode()).hexdigest()
        log = self.logs / f"{role}{index}.log"
        found = next((uid for uid in self.kept if uid.rpartition("g")[0] == f"{role}{index}"), None)
        if found is not None:
            host, pid = self.kept.pop(found)
            replica = Served(self, role, index, found, host, log)
            if (self.tmp / f"{found}.made").read_text() == made and not host.leaving:
                replica.pids, replica.adopted = [pid], True
            else:
                await host.kill(found)
                found = None
        if found is None:
            where = await self._living(f"{role}{index}", place.host, bound=not place.cpu)
            self._count += 1
            replica = Served(self, role, index, f"{role}{index}g{self._count}", where, log)
        self._by_uid[replica.uid] = replica
        try:
            if not replica.adopted:
                (self.tmp / f"{replica.uid}.in").write_bytes(payload)
                (self.tmp / f"{replica.uid}.made").write_text(made)
                names = {processes.REPLICA_VAR: replica.uid, processes.HOST_VAR: replica.host.name}
                socket, given = str(Served.place(self.tmp, replica.uid)), str(self.tmp / f"{replica.uid}.in")
                command = [sys.executable, "-P", "-m", "milkweed.fleet.serving", socket, target, given]
                replica.pids = [await replica.host.start_process(replica.uid, command, self.environment() | own | names, log)]
            replica.host.watch(replica.uid, replica.pids)
            await replica.connect(Served.place(self.tmp, replica.uid), self.token, deadline_s)
        except FleetError as error:
            await replica.stop()
            raise type(error)(replica.name, "refused", f"{error.cause}\n{replica.last_lines()}") from error.__cause__
        except BaseException:
            await replica.stop()
            raise
        self.replicas.append(replica)
        return replica

    async def end_unclaimed(self) -> None:
        """End what a former life has left and nobody has taken."""
        for uid, (host, _) in self.kept.items():
            self.said.append(f"{uid} of this run's former life has no place in this mesh, and was ended")
            await host.kill(uid)
        self.kept.clear()

    async def _settle_former(self) -> bool:
        """Whether this fleet takes over from a former life of its run; what it cannot use of one is ended."""
        life = await asyncio.to_thread(former.former, self.logs)
        if life is None:
            return False
        if self.mesh.hosts.orphan_grace_s and life.grace_s and life.keepers:
            self.token, self.tmp = life.token, life.folder
            return True
        count = await asyncio.to_thread(former.end, life)
        if count:
            self.said.append(f"{count} processes of this run's former life were still there, and were ended")
        return False

    async def _adopt(self, index: int) -> Host | None:
        """That host of the former life, if it waits."""
        host = self._host(index, f"h{index}-{os.getpid()}")
        try:
            kept = await asyncio.to_thread(host.adopt, self.environment())
        except PeerDied as error:
            self.said.append(f"{host.name} of this run's former life cannot be adopted: {error.cause}")
            return None
        self.kept |= {uid: (host, pid) for uid, pid in kept.items()}
        self._count = max([self._count, *(int(uid.rpartition("g")[2]) for uid in kept)])
        self.said.append(f"{host.name} of this run's former life was adopted, with {', '.join(sorted(kept)) or 'nothing on it'}")
        return host

    def _host(self, index: int, address: str) -> Host:
        host = Host(index, self.tmp, self.token, self.logs / f"host{index}.log", address=address)
        host.on_exit, host.on_lost, host.on_stopped = self._process_gone, self._host_gone, self._process_stopped
        host.on_notice = lambda host: self.on_notice(host)
        return host

    def _launch(self, index: int) -> Host:
        n = len(self._gone)
        host = self._host(index, f"h{index}-{n}" if n else f"h{index}")
        # without a run directory no other controller would know of it
        host.launch(self.environment(), self.mesh.hosts.orphan_grace_s if self.run_dir is not None else 0.0)
        return host

    async def _living(self, name: str, index: int, *, bound: bool) -> Host:
        """That host, or where it is about to be taken away another; one that was lost is brought up anew first. Raises as
        `Host.attach`, and PeerDied (lost) where there is none."""
        async with self._renewing:
            hosts = [self.hosts[index], *(h for h in self.hosts if not bound and not h.lost)]
            host = next((h for h in hosts if not h.leaving), None)
            if host is None:
                raise PeerDied(name, "lost", f"{self.hosts[index].name} is about to be taken away, and there is no other host for it")
            index = host.index
            if host.lost and not self._stopped:
                self._gone.append(host)
                self.hosts[index] = host = self._launch(index)
                await host.attach(HOST_DEADLINE_S)
            return host

    async def _bring_up(
        self,
        replica: Replica,
        actor_class: type,
        args: tuple[Any, ...],
        procs: int,
        env: dict[str, str],
        distributed: bool,
        end: float,
    ) -> None:
        own = {
            processes.REPLICA_VAR: replica.uid,
            processes.HOST_VAR: replica.host.name,
            "MILKWEED_LOG": str(replica.log),
        }
        whole = self.environment() | env
        if replica.role in credentials.ROLES:
            whole |= credentials.emptied(whole, getattr(self.mesh, replica.role).credentials)
        command = monarch_compat.replica_command(sys.executable, whole | own)

        async def within(answer: Any, what: str) -> Any:
            return await replica.settle(answer.as_asyncio(), what, max(0.1, end - time.monotonic()))

        replica.procs = replica.host.mesh.spawn_procs({"procs": procs}, name=replica.uid, bootstrap_command=command)
        agents = replica.procs.spawn(f"{replica.uid}-agent", Agent)
        found = await within(agents.pid.call(), "the start of its processes")
        replica.pids = [pid for _, pid in found.items()]
        replica.host.watch(replica.uid, replica.pids)
        if distributed:
            first = agents if procs == 1 else agents.slice(hosts=0, procs=0)
            port = await within(first.free_port.call_one(), "the choice of a port")
            left = max(0.1, end - time.monotonic())
            task = asyncio.ensure_future(monarch_compat.set_distributed_environment(replica.procs, "127.0.0.1", port))
            await replica.settle(task, "the set-up of torch.distributed", left)
        replica.actors = replica.procs.spawn(replica.uid, actor_class, *args)
        await within(monarch_compat.ready(replica.actors), f"the constructor of {actor_class.__name__}")

    async def stop(self) -> None:
        """Take everything down: every process, its children, its shared memory and the temporary folder."""
        if self._stopped:
            return
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()
        for replica in list(self._by_uid.values()):
            replica.fail(PeerDied(replica.name, "died", "the fleet was stopped"))
            replica.stopped = True
        await asyncio.gather(*(asyncio.to_thread(h.stop) for h in [*self.hosts, *self._gone]))
        self._by_uid.clear()
        self.replicas.clear()
        monarch_compat.hear_faults(self.heard, on=False)
        if self.run_dir is not None:
            former.forget(self.logs)
        shutil.rmtree(self.tmp, ignore_errors=True)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def environment(self) -> dict[str, str]:
        """What every process of the fleet starts with."""
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("TOKENIZERS_PARALLELISM", "false")
        if self.mesh.hosts.kind == "local":
            env = loopback.ENVIRONMENT | env
        env.pop(processes.REPLICA_VAR, None)
        return env | {
            processes.TOKEN_VAR: self.token,
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": os.pathsep.join(_import_path()),
            "PYTHONUNBUFFERED": "1",
        }

    def heard(self, report: str) -> None:
        """Keep a report of Monarch's in `fleet.log`; the failures in it reach callers by their own ways."""
        try:
            with self._log_lock:
                if self.logs.is_dir():
                    with (self.logs / "fleet.log").open("a") as log:
                        log.write(f"{time.strftime('%H:%M:%S')} {report.strip()}\n")
        except OSError as error:
            if not no_room(error):
                raise

    def forget(self, replica: Replica) -> None:
        """Called by a replica that was stopped."""
        self._by_uid.pop(replica.uid, None)
        if replica in self.replicas:
            self.replicas.remove(replica)

    def _process_gone(self, uid: str, pid: int, how: str) -> None:
        replica = self._by_uid.get(uid)
        if replica is not None:
            rank = replica.pids.index(pid)
            replica.fail(replica.died(f"process {pid} (rank {rank}) ended {how}".rstrip()))
            # its other ranks wait for this one, its children for nobody: none may hold memory or a GPU until `stop`
            replica.host.kill_soon(uid)

    def _process_stopped(self, uid: str, pid: int) -> None:
        replica = self._by_uid.get(uid)
        if replica is not None:
            replica.fail(DeadlineExceeded(replica.name, "hung", f"its process {pid} was stopped by a signal, and not continued"))
            replica.host.kill_soon(uid)

    def _host_gone(self, host: Host, why: str) -> None:
        self.heard(why)
        for replica in list(self._by_uid.values()):
            if replica.host is host:
                replica.fail(PeerDied(replica.name, "lost", why))


def _import_path() -> list[str]:
    """The folders from which this process imports, beyond the environment's own: replicas import the same code."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    own = {
        standard,
        standard / "lib-dynload",
        *(Path(p).resolve() for p in [*site.getsitepackages(), site.getusersitepackages()]),
    }
    folders = [*(Path(p or ".").resolve() for p in sys.path), Path(__file__).resolve().parents[2]]
    return [str(f) for f in dict.fromkeys(folders) if f.is_dir() and f not in own]


async def _tick() -> None:
    while True:
        await asyncio.sleep(0.1)
