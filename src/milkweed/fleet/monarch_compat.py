"""The one place that knows Monarch: its environment, its private parts, its errors. Read from Monarch 0.7.0.

Importing this module imports Monarch (not torch) with the environment it should read. Deaths are seen by the keepers,
in milliseconds; Monarch's own checks come second and are patient, since a process busy in Python cannot answer them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from milkweed.errors import ConfigError

MONARCH_VERSION = "0.7.0"
READY = "milkweed_ready"
_CLIENT: list[str] = []
_HEARERS: list[Callable[[str], None]] = []

ENVIRONMENT = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "60s",
    # at least the sum of the three above, or a slow answer counts as a dead controller
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "180s",
    "HYPERACTOR_MESH_PROC_STOP_MAX_IDLE": "3s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "60s",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "60s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "15s",
    # an engine's start takes long on a busy machine; our own deadlines are shorter where it matters
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "1800s",
    "HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG": "true",
    "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "false",
    "HYPERACTOR_MESH_ENABLE_FILE_CAPTURE": "false",
    # its own log grows by 18 MB an hour at the default level
    "MONARCH_FILE_LOG": "error",
}

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import monarch.actor  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # noqa: E402
from monarch._src.actor.actor_mesh import _Actor  # noqa: E402
from monarch._src.actor.endpoint import NotAnEndpoint  # noqa: E402
from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint  # noqa: E402

# where someone imported Monarch before us it has read the environment already
reload_config_from_env()

__all__ = [
    "Actor",
    "ActorError",
    "BootstrapCommand",
    "SupervisionError",
    "attach",
    "check_version",
    "concurrent_endpoint",
    "endpoint",
    "hear_faults",
    "open_context",
    "ready",
    "replica_command",
    "run_replica_process",
    "serve_host",
    "set_distributed_environment",
]


def check_version() -> None:
    """Raises ConfigError unless the installed Monarch is the one these private imports were read from."""
    found = version("torchmonarch")
    if found.split("+")[0] != MONARCH_VERSION:
        raise ConfigError(
            f"torchmonarch {found} is installed, milkweed needs {MONARCH_VERSION}: "
            f"pip install torchmonarch=={MONARCH_VERSION}"
        )


def hear_faults(heard: Callable[[str], None], on: bool = True) -> None:
    """Hand reports of faults that nobody caught to `heard`, or no longer. Monarch's own hook ends the controller; once
    this was called it is never back: late reports of a stopped fleet are dropped."""
    if on:
        _HEARERS.append(heard)
        monarch.actor.unhandled_fault_hook = lambda failure: [hear(failure.report()) for hear in list(_HEARERS)]
    elif heard in _HEARERS:
        _HEARERS.remove(heard)


def open_context(folder: os.PathLike[str]) -> None:
    """Make this process a Monarch client, with its sockets in `folder` (it would leave them in the temporary
    directory). Does nothing the second time."""
    if _CLIENT:
        return
    _CLIENT.append(os.fspath(folder))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = os.fspath(folder)
    try:
        monarch.actor.context()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
    atexit.register(_close_context)


def _close_context() -> None:
    """Before Monarch's own exit handler, which does the same (once) and prints a traceback if a stopped fleet's hosts
    do not answer in time. They are dead: there is nothing to wait for or to tell."""
    with contextlib.suppress(TimeoutError):
        monarch.actor.shutdown_context(host_timeout=0.1).get(timeout=0.5)


def attach(address: str, name: str) -> Any:
    """The host mesh of one worker that serves at `address`."""
    return monarch.actor.attach_to_workers(ca="trust_all_connections", workers=[address], name=name)


def replica_command(program: str, environment: Mapping[str, str]) -> BootstrapCommand:
    """How a worker starts one process of a replica: our bootstrap, which then runs Monarch's."""
    return BootstrapCommand(program, None, ["-P", "-m", "milkweed.fleet.replica_main"], dict(environment))


async def set_distributed_environment(proc_mesh: Any, address: str, port: int) -> None:
    """Give every process of the mesh what `torch.distributed` reads: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..."""
    from monarch.spmd import setup_torch_elastic_env_async

    await setup_torch_elastic_env_async(proc_mesh, master_addr=address, master_port=port)


def serve_host(address: str) -> None:
    """Be the worker of one host until killed."""
    monarch.actor.run_worker_loop_forever(address=address, ca="trust_all_connections")


def ready(actors: Any) -> Any:
    """Ask every rank whether its actor was constructed; the answer raises what the constructor raised.

    Monarch's own `initialized` only says that the mesh exists.
    """
    return actors._endpoint(MethodSpecifier.ReturnsResponse(READY), NotAnEndpoint(actors, READY), None).call()


def run_replica_process() -> None:
    """What `python -m monarch._src.actor.bootstrap_main` does, in this process, with `guard_actors` before it."""
    import multiprocessing

    from monarch._src.actor.bootstrap_main import invoke_main

    guard_actors()
    multiprocessing.set_start_method("forkserver", force=True)
    invoke_main()


def guard_actors() -> None:
    """Mend three things in every actor of this process: a `CancelledError` that leaves an endpoint kills the actor
    silently and later calls hang (it becomes a RuntimeError to the caller); a constructor that raises kills the actor,
    with a report of Monarch's own inside (it is kept, and `ready` raises it); and `ready` has something to call."""
    lookup, prepare = _Actor._lookup, _Actor._prepare

    def kept(actor: Any, context: Any, method: Any, message: Any, state: Any, references: Any, port: Any) -> Any:
        try:
            return prepare(actor, context, method, message, state, references, port)
        except Exception:
            if not isinstance(method, MethodSpecifier.Init) or actor._saved_error is None:
                raise
            traceback.print_exc()
            port.send(None)
            return None

    def guarded(actor: Any, context: Any, name: str) -> tuple[Callable[..., Any], bool, bool]:
        if actor.instance is None and actor._saved_error is not None:
            raise actor._saved_error.exception
        if actor.instance is not None and name == READY:
            return _nothing, False, False
        if name in actor._method_cache:
            return actor._method_cache[name]
        method, instrument, is_coroutine = lookup(actor, context, name)
        if is_coroutine:
            method = _uncancelled(method, name)
        actor._method_cache[name] = (method, instrument, is_coroutine)
        return actor._method_cache[name]

    _Actor._lookup, _Actor._prepare = guarded, kept


def _nothing() -> None:
    return None


def _uncancelled(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except asyncio.CancelledError as error:
            raise RuntimeError(f"{name} was cancelled from within") from error

    return call
