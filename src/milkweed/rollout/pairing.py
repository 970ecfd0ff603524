"""The router where prefill and decode are apart: each sample goes to two engines, which must hold the same weights."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from milkweed.rollout.protocol import EngineReply, Pair
from milkweed.rollout.records import Engine, Pending, UpdateReport
from milkweed.rollout.router import Router
from milkweed.transfer.manifest import Staged
from milkweed.types import PolicyVersion

DRAIN_S = 0.3
"""How long what is being prefilled and sent may hold up an update. The rest is taken back on both sides: it would have to be
computed anew anyway, and an engine takes no version before it knows that nobody writes into its memory."""
STILL_S = 0.05
"""Where nothing has arrived for so long, it is not waited for any longer: what is left waits for room, or is long."""
GIVE_BACK_S = 10.0
"""How long engines may take to give back what they decode."""
ASK_AGAIN_S = 1.0


class PairedRouter(Router):
    """Gives each sample to an engine that prefills, the one that holds its prefix or the least busy, and to the least busy
    of those that decode, whose answer it is. Where either fails before it is done, both are left, and another pair goes on
    from the tokens that are known.

    An update is one for all: nothing new is admitted, what is being sent gets to the decoding side, which then gives
    everything back with its tokens; the version is committed on all engines, none of which takes it while KV is under way;
    and the samples go on, each as a prompt with the tokens it has. So each part of a sample is of one version on both sides,
    which both compare with the version that the pair was made for. A sample that cannot be carried on (with a seed, or with
    stop strings) begins again.
    """

    paired = True

    def __init__(self, *args: Any, **more: Any) -> None:
        self._admits = True
        # a room is never used twice, also not by the controller after this one
        self._rooms = itertools.count(random.SystemRandom().getrandbits(40) << 20)
        super().__init__(*args, **more)

    def _place(self, p: Pending) -> None:
        if p.future.done():
            return
        if not self._served() and not self.expects:
            p.future.set_exception(self._ended or self._nobody())
            return
        if not self._room():
            if p.sent_at:  # it has been served before
                self._waiting.appendleft(p)
            else:
                self._waiting.append(p)
            return
        decode, least = self.crew.by_load.least(), self.crew.prefill_by_load.least()
        assert decode is not None and least is not None
        if p.request.score is not None:  # nothing is decoded
            self._put(p, least)
            return
        prefill = self._prefixes.choose(p, self.version, least, self.max_in_flight)
        self._prefixes.given(prefill, p)
        pair = Pair(prefill.stats.port, next(self._rooms), self.version)
        # under a new name, as the same engine may still be busy with giving up the last attempt
        p.request = msgspec.structs.replace(p.request, id=next(self._ids), pair=pair)
        p.prefill = prefill
        self._give(p, prefill)
        self._put(p, decode)

    def _room(self) -> bool:
        prefill = self.crew.prefill_by_load.least()
        return self._admits and super()._room() and prefill is not None and len(prefill.pending) < self.max_in_flight

    def _served(self) -> bool:
        usable = [e.prefills for e in self.crew if e.usable]
        return any(usable) and not all(usable)

    def _done(self, engine: Engine, p: Pending, reply: EngineReply) -> None:
        if engine.prefills and p.request.pair is not None and reply.error is None:
            return  # the decoding engine has its KV
        if not engine.prefills:
            engine.paced(p, len(reply.token_ids), asyncio.get_running_loop().time())
        p.future.set_result(reply)

    def _drop(self, p: Pending) -> None:
        # decoded to its end before the other engine could say that it had sent everything: it is let finish that
        done = p.future.done() and not p.future.cancelled() and not p.future.exception() and p.future.result().error is None
        if p.prefill is not None and not done:
            self._take_back(p, p.prefill)
        super()._drop(p)

    def _unpair(self, p: Pending) -> None:
        for engine in (p.engine, p.prefill):
            if engine is not None:
                self._take_back(p, engine)

    def _resend(self, engine: Engine, p: Pending, cause: str) -> None:
        if not p.future.done():
            self._unpair(p)
            super()._resend(engine, p, cause)

    def _hand_over(self, engine: Engine, some: Sequence[Pending]) -> None:
        left = [p for p in some if not p.future.done()]
        for p in left:
            self._unpair(p)
        super()._hand_over(engine, left)

    async def update_weights(
        self, staged: dict[str, Staged], version: PolicyVersion, *, deadline_s: float = 60.0
    ) -> UpdateReport:
        """As `Router.update_weights`, for all engines of either kind together (see the class)."""
        self._admits = False
        try:
            await self._empty()
            return await super().update_weights(staged, version, deadline_s=deadline_s)
        finally:
            self._admits = True
            self._fill()

    async def _empty(self) -> None:
        """Takes everything back from the engines, as far as they give it in time."""
        living = self.crew.living
        for engine in living:
            self._hand_over(engine, [p for p in engine.pending.values() if p.request in engine.outbox])
        await self._drained([e for e in living if e.prefills])
        staying = [e for e in living if not e.parting]
        for engine in staying:
            engine.parting = True
        try:
            await asyncio.gather(*(self._given_back(e) for e in living))
        finally:
            for engine in staying:
                engine.parting = False

    async def _drained(self, prefills: Sequence[Engine]) -> None:
        def left() -> int:
            return sum(len(e.pending) for e in prefills if e.dead is None)

        now = asyncio.get_running_loop().time
        end, last, still = now() + DRAIN_S, left(), now() + STILL_S
        while last and now() < min(end, still):
            await asyncio.sleep(0.002)
            if (count := left()) != last:
                last, still = count, now() + STILL_S

    async def _given_back(self, engine: Engine) -> None:
        end = asyncio.get_running_loop().time() + GIVE_BACK_S
        while engine.pending and engine.dead is None and asyncio.get_running_loop().time() < end:
            await self._tell(engine, "abort", list(engine.pending), deadline_s=GIVE_BACK_S)
            await self._emptied(engine, ASK_AGAIN_S, 0.002)
