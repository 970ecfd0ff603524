"""The engines that a router has now: who serves, who stands by, who comes and who goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from milkweed.rollout.protocol import EngineStats
from milkweed.rollout.records import ByLoad, Engine, EngineReplica


class Crew:
    """Engines by name; one that failed stays, for its cause, until another of its name takes its place.

    `wanted` engines serve; those beyond it stand by, with every version in them, and step in as soon as one fails.
    """

    def __init__(self, replicas: Sequence[EngineReplica], stats: Sequence[EngineStats], wanted: int) -> None:
        self.engines = [Engine(r, s) for r, s in zip(replicas, stats, strict=True)]
        """Those that only prefill too; none of these stands by."""
        self.wanted = wanted
        self._gone_tokens = 0
        self._gone_busy_s = 0.0
        self._gone_prefilled: dict[str, dict[str, int]] = {}
        for engine in [e for e in self.engines if not e.prefills][wanted:]:
            engine.standby = True
        self._sort()

    def _sort(self) -> None:
        self.by_load = ByLoad([e for e in self.engines if not e.prefills])
        self.prefill_by_load = ByLoad([e for e in self.engines if e.prefills])

    def changed(self, engine: Engine) -> None:
        """Its load or fitness may have changed."""
        (self.prefill_by_load if engine.prefills else self.by_load).changed(engine)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines)

    @property
    def living(self) -> list[Engine]:
        return [e for e in self.engines if e.dead is None]

    def find(self, name: str) -> Engine | None:
        """The living engine of that name."""
        return next((e for e in self.living if e.replica.name == name), None)

    def add(self, replica: EngineReplica, stats: EngineStats) -> Engine:
        """A new engine, which serves nothing before its first commit."""
        for old in [e for e in self.engines if e.replica.name == replica.name]:
            self.remove(old)
        engine = Engine(replica, stats)
        engine.standby, engine.stale = True, "it has not got the weights yet"
        self.engines.append(engine)
        self._sort()
        return engine

    def remove(self, engine: Engine) -> None:
        """Forget one that is dead or has left; what it did stays counted."""
        gone = self.prefilled()[engine.replica.name]
        self.engines.remove(engine)
        self._gone_tokens += engine.stats.tokens
        self._gone_busy_s = max(self._gone_busy_s, engine.stats.busy_s - engine.busy_at_start)
        self._gone_prefilled[engine.replica.name] = gone
        self._sort()

    def muster(self) -> None:
        """Engines that stand by step in where fewer than `wanted` serve."""
        serving = [e for e in self.living if not (e.standby or e.leaving or e.prefills)]
        ready = [e for e in self.living if e.standby and e.stale is None and not e.leaving]
        wanted = [e for e in ready if not e.prefills][: max(0, self.wanted - len([e for e in serving if e.stale is None]))]
        for engine in [*wanted, *(e for e in ready if e.prefills)]:
            engine.standby = False
        self.by_load.rebuild()
        self.prefill_by_load.rebuild()

    # ---- what they did

    @property
    def tokens(self) -> int:
        """Tokens sampled by all engines since the router began."""
        return self._gone_tokens + sum(e.stats.tokens for e in self.engines)

    def prefilled(self) -> dict[str, Any]:
        """Since the router began, in all and by engine's name: tokens of finished samples' prompts that were `computed` when
        the sample was begun, and those `reused`, whose KV was there. What updates made engines compute again is in neither.
        With a tier below the engines also how many of those reused came `from_memory` and `from_files`, and what was done
        with pages in files (`pages.COUNTS`). Engines that only prefill say how many tokens' KV they `moved` to others
        (`sglang_pairs.COUNTS`); those that only decode compute none."""
        by_name = {name: dict(counts) for name, counts in self._gone_prefilled.items()}
        for e in self.engines:
            s, counts = e.stats, by_name.setdefault(e.replica.name, {})
            now = {"computed": s.prompt_tokens - s.cached_tokens, "reused": s.cached_tokens}
            if s.cached_memory or s.files:
                now |= {"from_memory": s.cached_memory, "from_files": s.cached_files} | s.files
            now |= s.moved
            for key, number in now.items():
                counts[key] = counts.get(key, 0) + number
        keys = dict.fromkeys(["computed", "reused", *(key for counts in by_name.values() for key in counts)])
        return {key: sum(c.get(key, 0) for c in by_name.values()) for key in keys} | by_name

    def begin_stretch(self) -> None:
        """From here `stretch_s` counts."""
        self._gone_busy_s = 0.0
        for e in self.engines:
            e.busy_at_start = e.stats.busy_s

    def stretch_s(self) -> float:
        """Seconds since `begin_stretch` of the engine that was busy longest."""
        return max([self._gone_busy_s, *(e.stats.busy_s - e.busy_at_start for e in self.engines)])
