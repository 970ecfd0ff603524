"""An engine as a replica of the fleet: many requests in, many replies out, one version of the weights at a time.

A plain class for any event loop; `actor.py` makes it a Monarch actor.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from milkweed.errors import MilkweedError, TransferError
from milkweed.fleet.memory import freeze
from milkweed.rollout import sglang_pairs
from milkweed.rollout.answers import NOTHING, carries, finished, join, refusal, remaining, scored, since, so_far
from milkweed.rollout.checks import check_image, check_staged, folder_tensors, tied, verify
from milkweed.rollout.keeping import Keeping
from milkweed.rollout.protocol import (
    Begun,
    Blame,
    Collected,
    CommitReport,
    EngineReply,
    EngineRequest,
    EngineSpec,
    EngineState,
    EngineStats,
    Progress,
)
from milkweed.rollout.sglang_engine import EngineDied, SGLang, engine_arguments
from milkweed.rollout.sglang_hooks import LAYOUT, METHOD
from milkweed.transfer.manifest import Staged
from milkweed.transfer.plan import EngineLayout

_POLL_S = 0.2
"""How often the engine's processes are looked at; a death is known after this."""
PROGRESS_S = 1.0
"""How old the controller's knowledge of a running request may get: about what an engine's death costs it."""


class RolloutEngine:
    """Samples from one version of the weights at a time. Replies wait until `collect` takes them.

    A request that fails is answered with its error and disturbs no other. When a process of the engine dies, every
    request is answered with the blame on the engine, and `stats().state` is "dead" for good.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.version = spec.version
        self._sglang: SGLang | None = None
        self._state: EngineState = "serving"
        self._cause = ""
        self._staged: Staged | None = None
        self._layout_digest = ""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Begun] = {}
        """Of running requests: what there is of them, and how many of these tokens `collect` has told."""
        self._told: dict[str, int] = {}
        self._replies: list[EngineReply] = []
        self._news = asyncio.Event()
        self._keeping = Keeping()
        self._commit_lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._busy_since: float | None = None
        self._busy_s = self._idle_at = 0.0
        self._requests = self._tokens = self._prompt_tokens = 0
        self._cached_tokens = self._cached_memory = self._cached_files = 0
        self._port = sglang_pairs.Port() if spec.role == "prefill" else None
        self._moved = sglang_pairs.Moved()

    # ---- life

    async def start(self) -> EngineStats:
        """Loads the model; returns when the engine serves. Blocks the event loop meanwhile (the engine's processes
        live as long as the thread that starts them). Raises ConfigError, DataError, EngineDied, or TransferError where it
        prefills and would not be met."""
        if self._sglang is not None:
            return self.stats()  # for another controller, long ago
        c = self.spec
        self._expected, self._tied = folder_tensors(c.model), tied(c.model)
        self._sglang = SGLang(
            engine_arguments(
                c.model,
                cpu=c.cpu,
                dtype=c.dtype,
                tensor_parallel=c.tensor_parallel,
                version=str(c.version),
                overrides=sglang_pairs.arguments(c.role, cpu=c.cpu, port=self._port.number if self._port else 0) | c.arguments,
            )
        )
        if self._port is not None:
            self._port.met()
        self._watcher = asyncio.create_task(self._watch(), name="watch the engine's processes")
        freeze()
        return self.stats()

    async def close(self) -> None:
        """Ends the engine and its processes. May be called twice."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._sglang is not None and self._state != "dead":
            self._die("the engine was closed")
        if self._sglang is not None:
            self._sglang.close()
        if self._port is not None:
            self._port.close()

    async def _watch(self) -> None:
        while self._state != "dead":
            await asyncio.sleep(_POLL_S)
            if self._sglang is not None and (cause := self._sglang.dead()):
                self._die(cause)

    def _die(self, cause: str) -> None:
        if self._state == "dead":
            return
        self._state, self._cause = "dead", cause
        self._fail_running(cause)

    def _fail_running(self, cause: str) -> None:
        for request_id, task in list(self._running.items()):
            task.cancel()
            had = self._begun.get(request_id, NOTHING)
            self._finish(
                EngineReply(
                    id=request_id,
                    token_ids=had.token_ids,
                    logprobs=had.logprobs,
                    versions=had.versions,
                    finish_reason="error",
                    error=cause,
                    blame="engine",
                )
            )
        self._news.set()

    # ---- requests

    async def submit(self, requests: list[EngineRequest]) -> None:
        """Takes requests; returns at once. Each is answered once, by `collect`."""
        for r in requests:
            self._requests += 1
            if why := refusal(r, self._sglang):
                self._reply(EngineReply(id=r.id, finish_reason="error", error=why, blame="request"))
            elif self._state != "serving" or self._sglang is None:
                cause = f"the engine serves nothing ({self._state}): {self._cause or 'it was not started'}"
                self._reply(EngineReply(id=r.id, finish_reason="error", error=cause, blame="engine"))
            elif r.pair is not None and r.pair.version != self.version:
                cause = f"the engine serves {self.version}, the pair was made for {r.pair.version}"
                self._reply(EngineReply(id=r.id, finish_reason="error", error=cause, blame="pair"))
            else:
                if self._busy_since is None:
                    self._busy_since = time.monotonic()
                    self._news.set()  # whoever collects since nothing ran would wait long, and hear of no progress
                self._running[r.id] = asyncio.create_task(self._sample(r))

    async def collect(self, max_wait_s: float, linger_s: float = 0.0) -> Collected:
        """The replies since the last call; waits up to `max_wait_s` for the first one, and then up to `linger_s` for
        more while others still run, so that one message carries many. Requests that run on are told of every second."""
        if not self._replies and self._state != "dead":
            await self._wait(min(max_wait_s, PROGRESS_S) if self._running else max_wait_s)
        end = time.monotonic() + linger_s
        while self._replies and self._running and (left := end - time.monotonic()) > 0:
            await self._wait(left)
        replies, self._replies = self._replies, []
        began = time.monotonic()
        self._decode(replies)
        if replies and self._busy_since is None:  # turning tokens into text is part of generation
            self._busy_s += time.monotonic() - began
            self._idle_at = time.time()
        return Collected(replies, self.stats(), self._progress())

    def _progress(self) -> list[Progress]:
        news = []
        for request_id, begun in self._begun.items():
            start, self._told[request_id] = self._told[request_id], len(begun.token_ids)
            if len(begun.token_ids) > start:
                news.append(Progress(request_id, start, since(begun, start)))
        return news

    async def _wait(self, seconds: float) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    async def abort(self, ids: list[str], keep: bool = False) -> None:
        """Stops these requests; one that runs is answered with what it has, finish reason "abort". With `keep` its KV is
        first written to the files that lie below the engine, for another one to go on from."""
        if self._sglang is None or self._state == "dead":
            return
        for request_id in ids:
            if request_id in self._running:
                if keep:
                    self._keeping.add(request_id)
                self._sglang.abort(request_id)

    async def forsake(self, within_s: float = 5.0) -> None:
        """Whoever asked is gone: what runs is stopped, and nobody is answered."""
        await self.abort(list(self._running))
        end = time.monotonic() + within_s
        while self._running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._replies = []

    def stats(self) -> EngineStats:
        busy = self._busy_s + (time.monotonic() - self._busy_since if self._busy_since is not None else 0.0)
        engine = self._sglang
        return EngineStats(
            version=self.version,
            state=self._state,
            cause=self._cause,
            running=len(self._running),
            requests=self._requests,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            cached_memory=self._cached_memory,
            cached_files=self._cached_files,
            files=engine.files() if engine else {},
            moved=self._moved.read(),
            port=self._port.number if self._port else 0,
            busy_s=busy,
            idle_at=self._idle_at,
            start_s=engine.start_s if engine else 0.0,
            context_length=engine.context_length if engine else 0,
            pool_tokens=engine.pool_tokens if engine else 0,
            pids={"engine": os.getpid()} | (engine.pids if engine else {}),
        )

    async def _sample(self, r: EngineRequest) -> None:
        engine = self._sglang
        assert engine is not None
        try:
            if r.score is not None:
                reply = scored(r, await engine.score(r.id, r.token_ids, r.score, self.spec.role))
                self._prompt_tokens += len(r.token_ids)
            else:
                reply = await self._generate(engine, r)
            await self._keeping.written(r.id, engine)
        except asyncio.CancelledError:
            return  # the canceller has answered
        except Exception as e:  # whatever SGLang refuses or fails at, only this request is lost
            why = getattr(e, "detail", None) or str(e)
            cause = f"sample {r.name or r.id}: {type(e).__name__}: {why}"
            blame: Blame = "pair" if r.pair is not None and sglang_pairs.broken(why) else "sampling"
            reply = EngineReply(id=r.id, finish_reason="error", error=cause, blame=blame)
        self._finish(reply)

    async def _generate(self, engine: SGLang, r: EngineRequest) -> EngineReply:
        if r.begun is not None and len(r.token_ids) + len(r.begun.token_ids) > engine.longest_prompt:
            r = msgspec.structs.replace(r, begun=None)  # what began as output does not fit as a prompt
        begun = r.begun or NOTHING
        if carries(r.sampling):
            self._begun[r.id], self._told[r.id] = begun, len(begun.token_ids)

        def note(answer: dict[str, Any]) -> None:
            if (more := so_far(answer)) is not None and r.id in self._begun:
                self._begun[r.id] = join(r.begun, more)

        sampling, ids, prefills = remaining(r.sampling, r.begun), r.token_ids + begun.token_ids, self.spec.role == "prefill"
        tell = note if carries(sampling) and not prefills else None
        reply = finished(r, await engine.generate(r.id, ids, sampling, tell, r.pair))
        if reply.error is not None and r.pair is not None:
            reply.blame = "pair"
        if self.spec.role == "decode":  # what it was sent is counted where it was computed
            self._tokens += len(reply.token_ids) - len(begun.token_ids)
            return reply
        if prefills:  # the first token is told, and counted, by the engine that goes on
            reply.token_ids, reply.logprobs, reply.versions = [], [], []
        else:
            self._tokens += len(reply.token_ids) - len(begun.token_ids)
        self._prompt_tokens += len(ids)
        self._cached_tokens += reply.cached_tokens
        self._cached_memory += reply.cached_memory
        self._cached_files += reply.cached_files
        return reply

    def _decode(self, replies: list[EngineReply]) -> None:
        rows = [r for r in replies if r.token_ids]
        if not rows or self._sglang is None:
            return
        for reply, text in zip(rows, self._sglang.decode([r.token_ids for r in rows]), strict=True):
            cut = text.find(reply.text) if reply.text else -1
            reply.text = text[:cut] if cut >= 0 else text

    def _finish(self, reply: EngineReply) -> None:
        self._begun.pop(reply.id, None)
        self._told.pop(reply.id, None)
        if self._running.pop(reply.id, None) is None:
            return
        if not self._running and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since, self._idle_at = None, time.time()
        self._reply(reply)

    def _reply(self, reply: EngineReply) -> None:
        self._replies.append(reply)
        self._news.set()

    # ---- weights

    async def layout(self, deadline_s: float) -> bytes:
        """How the engine's parameters lie in memory (an EngineLayout as MessagePack): what versions are packed for.
        Raises MilkweedError where its loader does more than copy; then it takes whole tensors by name only."""
        import base64

        engine = self._sglang
        if engine is None or self._state == "dead":
            raise MilkweedError(f"no layout: {self._cause or 'the engine was not started'}")
        tensors = msgspec.json.encode(self._expected).decode()
        try:
            ok, message = await engine.call(LAYOUT, {"tensors": tensors}, deadline_s)
        except EngineDied as e:
            self._die(str(e))
            raise
        outcome = msgspec.json.decode(message) if message.startswith("{") else {"message": message}
        if not ok:
            raise TransferError(f"the engine's parameters cannot be traced: {outcome['message']}")
        raw = base64.b64decode(outcome["layout"])
        self._layout_digest = msgspec.msgpack.decode(raw, type=EngineLayout).digest()
        return raw

    async def commit(self, staged: Staged, deadline_s: float, fault: str = "") -> CommitReport:
        """Makes `staged` the version served, between two decode steps. Whatever is wrong with it before that leaves
        the engine untouched. Never raises for a commit that failed: the report tells what is served now.

        `fault` names a part that is to fail, for tests (see sglang_hooks.FAULTS)."""
        async with self._commit_lock:
            engine = self._sglang
            if engine is None or self._state == "dead":
                return self._report(False, self._cause or "the engine was not started")
            start = time.perf_counter()
            try:
                if staged.layout:
                    check_image(staged, self._layout_digest)
                else:
                    check_staged(staged, self._expected, is_tied=self._tied)
                    await asyncio.to_thread(verify, staged)  # the engine goes on decoding
            except TransferError as e:
                return self._report(False, f"refused, nothing changed: {e}")
            verify_ms = round((time.perf_counter() - start) * 1e3, 3)
            held = self._staged
            changed_only = staged.ranges is not None and held is not None and held.layout == staged.layout
            changed_only = changed_only and staged.base == self.version and self._state == "serving"
            encoded = lambda s: msgspec.json.encode(s).decode() if s is not None else ""  # noqa: E731
            how = {
                "staged": encoded(staged), "previous": encoded(self._staged), "folder": self.spec.model,
                "version": str(staged.version), "head": not self._tied, "fault": fault, "changed_only": bool(changed_only),
            }  # fmt: skip
            try:
                ok, message = await sglang_pairs.when_idle(lambda: engine.call(METHOD, how, deadline_s), deadline_s / 2)
            except EngineDied as e:
                # nobody knows what it serves now: it must not serve again
                self._die(str(e))
                return self._report(False, str(e))
            if not message.startswith("{"):
                return self._report(False, message)
            outcome = msgspec.json.decode(message)
            if ok:
                self._staged, self.version = staged, staged.version
                self._state, self._cause = "serving", ""
                engine.set_version(str(staged.version))
            elif outcome["state"] == "broken":
                self._break(outcome["message"])
            parts = {"verify": verify_ms} | outcome["parts"]
            seconds = time.perf_counter() - start
            return self._report(ok, outcome["message"], retracted=outcome["retracted"], seconds=seconds, parts=parts)

    def _break(self, cause: str) -> None:
        """Nothing is served until a commit succeeds: what waits in the engine is given back."""
        self._state, self._cause = "broken", cause
        for request_id in self._running:
            self._sglang.abort(request_id)  # type: ignore[union-attr]
        self._fail_running(cause)

    def _report(self, ok: bool, message: str, **more: Any) -> CommitReport:
        return CommitReport(ok=ok, state=self._state, version=self.version, message=message, **more)

    async def checksum(self) -> dict[str, str]:
        """SGLang's checksum over the live parameters by rank; equal for engines with equal weights and degrees."""
        if self._sglang is None or self._state == "dead":
            raise MilkweedError(f"no checksum: {self._cause or 'the engine was not started'}")
        return await self._sglang.checksum()
