"""NIXL agents: the only module that imports NIXL, with what its wheel gets wrong put right.

Read from NIXL 1.5.1. Private there: `_api.nixlBind` and the attribute `pthrDelay` of its agent configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from milkweed.errors import TransferError

NIXL_VERSION = "1.5.1"
_WHEELS = ("nixl_cu12", "nixl_cu13")  # `import nixl` itself would import torch to choose between them
# 0.015 of a core when idle; the wheel hard-codes 0, a progress thread that spins on a whole one. TCP is no slower for it
_PROGRESS_DELAY_US = 4000
# entries are split on commas, so no list-valued option may stand here; larger segments more than double TCP
_UCX = {"engine_config": "TCP_TX_SEG_SIZE=1m,TCP_RX_SEG_SIZE=1m"}
_construction = threading.Lock()


def _api() -> Any:
    for wheel in _WHEELS:
        if importlib.util.find_spec(wheel) is not None:
            api = importlib.import_module(f"{wheel}._api")
            if "NIXL_LOG_LEVEL" not in os.environ:  # it prints two lines on stdout for each agent
                logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
    raise TransferError(f"NIXL is not installed: pip install nixl-cu12=={NIXL_VERSION}")


def installed_version() -> str | None:
    """The version of the NIXL wheel, None without one."""
    from importlib.metadata import PackageNotFoundError, version

    for wheel in _WHEELS:
        try:
            return version(wheel.replace("_", "-"))
        except PackageNotFoundError:
            continue
    return None


@contextmanager
def paced() -> Iterator[None]:
    """Agents made within it, whoever makes them, have progress threads that sleep between looks instead of spinning. One at a
    time: their constructor looks its configuration class up in the module, which is lent ours."""
    bind = _api().nixlBind

    class Paced(bind.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, _PROGRESS_DELAY_US if key == "pthrDelay" else value)

    with _construction:
        plain, bind.nixlAgentConfig = bind.nixlAgentConfig, Paced
        try:
            yield
        finally:
            bind.nixlAgentConfig = plain


class Agent:
    """A NIXL agent under a name of its own: `mw-<role>-<uuid>`, new at every incarnation, since NIXL refuses a second
    agent under a name it knows.

    A side that others read from needs `progress=True` (a thread that answers them, asleep nearly all the time). A side
    that reads polls its own reads and needs none. Not to be used after a fork.
    """

    def __init__(self, role: str, *, progress: bool) -> None:
        api = _api()
        self.name = f"mw-{role}-{uuid.uuid4().hex[:16]}"
        self._peers: set[str] = set()
        self._closed = False
        try:
            with paced():
                config = api.nixl_agent_config(backends=[], enable_prog_thread=progress)
                self._agent = api.nixl_agent(self.name, config)
            self._agent.create_backend("UCX", _UCX)
        except Exception as error:
            raise TransferError(f"NIXL agent {self.name} did not start with the UCX backend: {error!r}") from error

    @property
    def plugins(self) -> list[str]:
        """Backends whose plugin the wheel brings, whether or not their hardware is here."""
        return sorted(self._agent.get_plugin_list())

    @property
    def backends(self) -> list[str]:
        """Backends that this agent runs."""
        return sorted(self._agent.backends)

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read from this agent; taken after `register`."""
        return self._agent.get_agent_metadata()

    def register(self, arena: Any) -> None:
        """Let an Arena, or anything with its `address`, `nbytes` and `kind`, be read from or into. It must outlive this agent: whoever unmaps what a peer knows may crash."""
        try:
            self._agent.register_memory([(arena.address, arena.nbytes, 0, "")], arena.kind)
        except Exception as error:
            raise TransferError(f"NIXL cannot register {arena.nbytes} bytes of {arena.kind}: {error!r}") from error

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make the peer of that name readable. Raises TransferError if the metadata is not that peer's."""
        if name in self._peers:
            return
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL refuses the metadata of {name}: {error!r}") from error
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            raise TransferError(f"NIXL metadata given as that of {name} belongs to {found}")
        self._peers.add(name)

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(self._peers)

    def remove_peer(self, name: str) -> None:
        """Forget a peer; its reads must have been dropped before."""
        self._peers.discard(name)
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise TransferError(f"NIXL cannot forget {name}: {error!r}") from error

    def prepare_reads(
        self, local: int | Sequence[int], peer: str, remote: int, pieces: Sequence[tuple[int, int]], kind: str = "DRAM"
    ) -> list[Read]:
        """A reusable READ for each `(offset, nbytes)`, from address `remote + offset` of `peer` to `local + offset`, or
        to each piece's own address where `local` gives one for each."""
        table = np.array([(offset, nbytes, 0) for offset, nbytes in pieces], np.uint64)
        here, there = table.copy(), table.copy()
        if isinstance(local, int):
            here[:, 0] += np.uint64(local)
        else:
            here[:, 0] = np.array(local, np.uint64)
        there[:, 0] += np.uint64(remote)
        try:
            ours = self._agent.prep_xfer_dlist("", here, kind)
            theirs = self._agent.prep_xfer_dlist(peer, there, kind)
            return [
                Read(self._agent, self._agent.make_prepped_xfer("READ", ours, [i], theirs, [i]), (ours, theirs))
                for i in range(len(pieces))
            ]
        except Exception as error:
            raise TransferError(f"NIXL cannot prepare reads from {peer}: {error!r}") from error

    def close(self) -> None:
        """Stop the agent. Its reads must have been dropped; the memory it registered may be freed afterwards."""
        if not self._closed:
            self._closed = True
            del self._agent


class Read:
    """One prepared one-sided read of one piece."""

    def __init__(self, agent: Any, handle: Any, lists: tuple[Any, Any]) -> None:
        self._agent, self._handle, self._lists = agent, handle, lists

    def start(self) -> bool:
        """Post it; True when it is already done. Between processes of one host this blocks for the copy, without the
        GIL."""
        return self._state(self._agent.transfer)

    def done(self) -> bool:
        """Whether it has arrived. Raises TransferError if it failed."""
        return self._state(self._agent.check_xfer_state)

    def _state(self, ask: Any) -> bool:
        try:
            state = ask(self._handle)
        except Exception as error:
            raise TransferError(f"NIXL READ failed: {error!r}") from error
        if state == "ERR":
            raise TransferError("NIXL READ failed: state ERR")
        return state == "DONE"
