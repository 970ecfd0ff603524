"""Finds the engine that answers, but wrongly or much more slowly than its peers.

Engines that serve the same version must hold the same weights (SGLang's checksum of them) and give the same log-probs of a
fixed sequence, up to rounding. Where they part, the many are right; where there is no majority, none of them is trusted. A
slow one is judged by the seconds a token of its samples take, against the middle of its peers'. What is found is given to the
router as a failure, so that its supervisor replaces it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from milkweed.errors import FleetError, MilkweedError

if TYPE_CHECKING:
    from milkweed.config.mesh import EngineConfig
    from milkweed.rollout.records import Engine
    from milkweed.rollout.router import Router

PROBE = (1, 2, 3, 5, 7, 6, 4, 1)
"""Token ids that every vocabulary has."""
AGAIN_S, TRIES = 0.5, 20
"""Where versions changed hands meanwhile, what was said cannot be compared, and is asked again so much later, so often."""
FEWEST = 16
"""Samples of an engine that say something of its pace."""


class Health:
    """Looks at the engines of `router` every `look_s` seconds, once it has a loop. `ours` says whether an engine's place is
    kept."""

    def __init__(self, router: Router, ours: Callable[[Engine], bool], config: EngineConfig) -> None:
        self.router, self._ours, self._config = router, ours, config
        self._slow: set[Engine] = set()
        self._task = asyncio.ensure_future(self._watch()) if config.look_s else None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.look_s)
            await self.look()

    async def look(self) -> None:
        """One look. What is found wrong is lost to the router when this returns."""
        found = [(engine, "slow", why) for engine, why in self.slow()]
        for _ in range(TRIES):
            turns = self.router.turns
            wrong = await self.wrong()
            if turns % 2 == 0 and turns == self.router.turns:
                found += [(engine, "wrong", why) for engine, why in wrong]
                break
            await asyncio.sleep(AGAIN_S)
        for engine, kind, why in found:
            if engine.dead is None and self._ours(engine):
                self.router.lose(engine, FleetError(engine.replica.name, kind, why))

    async def wrong(self) -> list[tuple[Engine, str]]:
        """Engines whose weights or log-probs are not those of their peers, and in what."""
        serving = [e for e in self.router.crew.living if e.stale is None and not e.leaving]
        versions = {e: e.stats.version for e in serving}
        if len(serving) < 2:
            return []
        answers = await asyncio.gather(*(self._answer(e) for e in serving))
        found: list[tuple[Engine, str]] = []
        for version in set(versions.values()):
            # one that took another version meanwhile said nothing of either
            here = {e: a for e, a in zip(serving, answers) if a is not None and versions[e] == version == e.stats.version}
            if len(here) < 2:
                continue
            odd = _odd({e: checksum for e, (checksum, _) in here.items()})
            found += [(e, f"its weights of version {version} have another checksum than those of {_others(here, odd)}") for e in odd]
            rest = {e: probe for e, (_, probe) in here.items() if e not in odd and probe}
            apart = self._apart(rest)
            found += [(e, f"under version {version} it gives other log-probs of the same tokens than {_others(rest, apart)}") for e in apart]
        return found

    async def _answer(self, engine: Engine) -> tuple[Hashable, tuple[float, ...]] | None:
        """Its checksum and its log-probs of the probe (none where it only decodes: it computes no prompt); None where it does
        not say (which others find out)."""
        name = engine.replica.name
        try:
            checksum = await engine.replica.call_one("checksum", deadline_s=60.0)
            if self.router.paired and not engine.prefills:
                return tuple(sorted(checksum.items())), ()
            reply = await self.router.ask_one(engine, PROBE, name=f"probe of {name}", deadline_s=60.0)
        except MilkweedError:
            return None
        return tuple(sorted(checksum.items())), tuple(reply.logprobs)

    @staticmethod
    def _apart(probes: dict[Engine, tuple[float, ...]]) -> list[Engine]:
        """Rounded to what one bfloat16 kernel may give differently from another, they must be the same."""
        if len(probes) < 2:
            return []
        middle = [statistics.median(column) for column in zip(*probes.values())]
        far = [e for e, probe in probes.items() if max(abs(a - b) for a, b in zip(probe, middle)) > 0.25]
        return list(probes) if far and len(far) * 2 >= len(probes) else far

    def slow(self) -> list[tuple[Engine, str]]:
        """Engines that were much slower than their peers at this look and the one before, and how much."""
        paces = {e: statistics.median(e.paces) for e in self.router.crew.living if len(e.paces) >= FEWEST and not e.leaving}
        before, self._slow = self._slow, set()
        found = []
        for engine, pace in paces.items():
            peers = [p for e, p in paces.items() if e is not engine]
            if self._config.slower and peers and pace > self._config.slower * statistics.median(peers):
                self._slow.add(engine)
                if engine in before:
                    found.append((engine, f"it takes {pace:.3g} s a token, its peers {statistics.median(peers):.3g} s"))
            engine.paces.clear()
        return found

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _odd(values: dict[Engine, Hashable]) -> list[Engine]:
    """Those whose value is not that of more than half."""
    value, count = Counter(values.values()).most_common(1)[0]
    if count * 2 > len(values):
        return [e for e, v in values.items() if v != value]
    return list(values)


def _others(here: Iterable[Engine], odd: list[Engine]) -> str:
    return ", ".join(sorted(e.replica.name for e in here if e not in odd)) or "each other"
