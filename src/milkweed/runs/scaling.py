"""How many engines serve follows how much there is to sample, within the limits of the mesh file.

The rule is that of horizontal autoscalers (Kubernetes' HPA, Ray Serve): as many engines as bring the samples at hand for
each down to a target. What counts is the mean over a delay, short before one more and long before one less, since at hand
there are many while a step is sampled and none while it is trained on.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from milkweed.errors import MilkweedError

if TYPE_CHECKING:
    from milkweed.config.mesh import EngineConfig
    from milkweed.rollout.router import Router

LOOK_S = 1.0


class Scaling:
    """Calls `router.scale` for a `config` with `max_replicas`; `said` hears of each time in words, and of what kept it from it."""

    def __init__(self, router: Router, config: EngineConfig, said: Callable[[str], None]) -> None:
        self.router, self._config, self._said = router, config, said
        self._queue: deque[int] = deque(maxlen=math.ceil(max(config.upscale_delay_s, config.downscale_delay_s) / LOOK_S))
        self._task = asyncio.ensure_future(self._watch()) if config.max_replicas else None

    def wanted(self) -> tuple[int, float, float]:
        """How many engines should serve now, and why: the mean number of samples at hand over so many seconds."""
        c, have = self._config, self.router.crew.wanted
        for delay, way in ((c.upscale_delay_s, 1), (c.downscale_delay_s, -1)):
            count = math.ceil(delay / LOOK_S)
            if len(self._queue) < count:
                continue  # not long enough since the last change
            mean = sum(list(self._queue)[-count:]) / count
            right = min(max(math.ceil(mean / c.target_requests), c.replicas), c.max_replicas)
            if way * (right - have) > 0:
                return right, mean, delay
        return have, 0.0, 0.0

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # a sample that one engine prefills and another decodes is on both
            self._queue.append(sum(n for name, n in self.router.load.items() if not name.startswith("prefill")))
            have = self.router.crew.wanted
            right, mean, delay = self.wanted()
            if right == have:
                continue
            why = f"{mean:.0f} samples were at hand over {delay:g} s, and {self._config.target_requests} are an engine's share"
            self._said(f"{have} -> {right} engines: {why}")
            try:
                await self.router.scale(right)
            except MilkweedError as error:
                self._said(f"{have} -> {right} engines failed: {error}")
            self._queue.clear()

    def close(self) -> None:
        """Nothing is scaled any more."""
        if self._task is not None:
            self._task.cancel()
