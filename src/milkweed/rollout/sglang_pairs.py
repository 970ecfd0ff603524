"""SGLang's engines that prefill or decode only: how they are started, asked and counted. Read from SGLang 0.5.23.

Both engines of a sample get the same request under the same number, its room. The one that decodes reserves the KV and says
where it lies, the one that prefills computes the prompt and the first token and writes both there over NIXL (DRAM on a CPU,
VRAM on a GPU); from then on the sample is the decoding engine's. They find each other by a small HTTP server in the process
of the one that prefills. It has no password, so everything of this is kept on loopback, where all hosts of a mesh are.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from milkweed.errors import TransferError
from milkweed.rollout.pages import Counts
from milkweed.transfer import nixl

if TYPE_CHECKING:
    from milkweed.rollout.protocol import EngineRole, Pair

HOST = "127.0.0.1"
NOBODY = "2.2.2.2"
"""SGLang's `FAKE_BOOTSTRAP_HOST`: a prompt whose KV is sent nowhere."""
PAIRED = "MILKWEED_PAIRED"
"""Set in the processes of engines that prefill or decode only."""
MOVED = "MILKWEED_MOVED"
"""In the processes of engines that prefill: how the paths begin under which they count what they move."""
COUNTS = ("moved_tokens", "moved_bytes", "moved_us")
"""Tokens whose KV was moved, its bytes, and the microseconds from the post of a transfer until it was done."""
RELEASE_S = 5
"""How long a decoding engine keeps the KV of a broken-off transfer back when the other engine does not say that it writes no
more. Longer than it takes until a process that was stopped counts as hung and is ended."""
PAGE = 16
"""Tokens of a page of KV, the least that is moved and found in a cache; single tokens travel at a twentieth of the speed."""
REGISTERED_S = 20.0
BUSY = "not idle yet:"
"""In why an engine that prefills or decodes only does not take a version; it may once what it has to clean up is done."""
IDLE_S = RELEASE_S + 3.0


def environment(role: EngineRole, counts: str) -> dict[str, str]:
    """Variables for the process of an engine of `role`, which counts in files whose paths begin with `counts`."""
    if role == "whole":
        return {}
    env = {PAIRED: "1", "SGLANG_HOST_IP": HOST, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(RELEASE_S)}
    for name in ("no_proxy", "NO_PROXY"):  # SGLang asks for its peers with what obeys http_proxy
        env[name] = ",".join(x for x in (os.environ.get(name), HOST) if x)
    return env | ({MOVED: counts} if role == "prefill" else {})


def arguments(role: EngineRole, *, cpu: bool, port: int) -> dict[str, Any]:
    """SGLang's ServerArgs for an engine of `role`; `port` is where one that prefills is met."""
    if role == "whole":
        return {}
    args: dict[str, Any] = {"disaggregation_mode": role, "disaggregation_transfer_backend": "nixl", "page_size": PAGE}
    if cpu:
        args["disable_overlap_schedule"] = True  # on a CPU it does not start with it
    if role == "prefill":
        return args | {"disaggregation_bootstrap_port": port}
    # the other choice is as much host memory again as the engine's KV
    return args | {"disaggregation_decode_retraction_backup": "cpu_tensor"}


class Port:
    """A free port of loopback, which nobody else is given while this lives. SGLang may listen on it: a socket that is bound
    with SO_REUSEADDR and does not listen is in no other's way who sets that too."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]

    def met(self, within_s: float = REGISTERED_S) -> None:
        """Waits until whoever decodes would find the engine there. Raises TransferError where not within `within_s`."""
        end, why = time.monotonic() + within_s, ""
        ask = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        while time.monotonic() < end:
            connection = http.client.HTTPConnection(HOST, self.number, timeout=2)
            try:
                connection.request("GET", ask)
                answer = connection.getresponse()
                why = answer.read().decode(errors="replace")
                if answer.status == 200:
                    return
            except (OSError, http.client.HTTPException) as e:
                why = str(e)
            finally:
                connection.close()
            time.sleep(0.05)
        raise TransferError(f"engines that decode cannot meet this one on {HOST}:{self.number} after {within_s:g} s: {why}")

    def close(self) -> None:
        self._socket.close()


def asked(pair: Pair | None) -> dict[str, Any]:
    """Of a GenerateReqInput, what names the other engine."""
    return {} if pair is None else {"bootstrap_host": HOST, "bootstrap_port": pair.port, "bootstrap_room": pair.room}


def alone(role: EngineRole) -> dict[str, Any]:
    """Of a GenerateReqInput that an engine which prefills answers by itself."""
    return {"bootstrap_host": NOBODY, "bootstrap_room": 0} if role == "prefill" else {}


_BROKEN = ("Decode handshake failed", "Decode transfer failed", "Prefill bootstrap failed", "Prefill transfer failed", "Context corruption detected", "Metadata unexpectedly not ready")  # fmt: skip


def broken(message: str) -> bool:
    """Whether SGLang says with it that KV did not get from one engine to the other, which says nothing of the sample."""
    return message.startswith(_BROKEN)


async def when_idle(call: Callable[[], Awaitable[tuple[bool, str]]], within_s: float) -> tuple[bool, str]:
    """What `call` says once it does not say that the engine is busy, or after `within_s` (or IDLE_S) seconds."""
    end = time.monotonic() + min(within_s, IDLE_S)
    while True:
        ok, message = await call()
        if ok or BUSY not in message or time.monotonic() > end:
            return ok, message
        await asyncio.sleep(0.01)


# ---- in the schedulers


def busy(scheduler: Any) -> str:
    """What a scheduler that prefills or decodes only has not finished; an update waits for it. Empty where nothing."""
    if scheduler.is_fully_idle():
        return ""
    queues = {
        "waiting": scheduler.waiting_queue,
        "running": scheduler.running_batch.reqs,
        "meeting": getattr(scheduler.disagg_prefill_bootstrap_queue, "queue", ()),
        "sending": scheduler.disagg_prefill_inflight_queue or (),
        "reserving": getattr(scheduler.disagg_decode_prealloc_queue, "queue", ()),
        "receiving": getattr(scheduler.disagg_decode_transfer_queue, "queue", ()),
        "held back": getattr(scheduler.disagg_decode_transfer_queue, "_deferred_releases", ()),
    }
    return ", ".join(f"{len(some)} {name}" for name, some in queues.items() if len(some)) or "something unnamed"


def register(registry: Any, kinds: Any) -> None:
    if PAIRED not in os.environ:
        return
    manager = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
    registry.register(f"{manager}.__init__", _made, kinds.AROUND)
    if MOVED not in os.environ:
        return
    registry.register(f"{manager}.send_kvcache", _sent, kinds.AROUND)
    registry.register(f"{manager}._await_handles", _settled, kinds.AROUND)


def _made(original: Callable[..., Any], manager: Any, kv: Any, *rest: Any, **more: Any) -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        kv.kv_data_mem_kinds = ["DRAM"] * len(kv.kv_data_ptrs)  # SGLang takes it for VRAM
    with nixl.paced():
        original(manager, kv, *rest, **more)


_posted = threading.local()
"""Of each of SGLang's sending threads: transfers posted and not yet done, as (began, tokens, bytes)."""
_counts: list[Counts] = []
_making = threading.Lock()


def _sent(original: Callable[..., Any], manager: Any, peer: str, indices: Any, *rest: Any, **more: Any) -> Any:
    began = time.perf_counter()
    handle = original(manager, peer, indices, *rest, **more)
    kv = manager.kv_args
    transfer = (began, len(indices) * kv.page_size, len(indices) * sum(kv.kv_item_lens))
    # between processes of one host the post itself copies
    if handle is not None and manager.agent.check_xfer_state(handle) == "DONE":
        _count(manager, transfer)
    else:
        _posted.__dict__.setdefault("some", []).append(transfer)
    return handle


def _settled(original: Callable[..., Any], manager: Any, handles: Any, **more: Any) -> Any:
    outcome = original(manager, handles, **more)
    posted, _posted.some = _posted.__dict__.get("some", []), []
    if outcome == (True, False):
        for transfer in posted:
            _count(manager, transfer)
    return outcome


def _count(manager: Any, transfer: tuple[float, int, int]) -> None:
    began, tokens, nbytes = transfer
    took = int((time.perf_counter() - began) * 1e6)
    with _making:
        if not _counts:  # the engine's process is the parent of its schedulers
            _counts.append(Counts(f"{os.environ[MOVED]}{os.getppid()}-{manager.kv_args.engine_rank}", create=True, names=COUNTS))
    for name, number in zip(COUNTS, (tokens, nbytes, took)):
        _counts[0].add(name, number)


class Moved:
    """What the scheduler of the engine in this process has moved."""

    def __init__(self) -> None:
        self._counts: Counts | None = None

    def read(self) -> dict[str, int]:
        where = os.environ.get(MOVED)
        if where is None:
            return {}
        if self._counts is None:
            try:
                self._counts = Counts(f"{where}{os.getpid()}-0", names=COUNTS)
            except (FileNotFoundError, ValueError):  # nothing was moved yet, or the file is being made
                return dict.fromkeys(COUNTS, 0)
        return self._counts.read()

