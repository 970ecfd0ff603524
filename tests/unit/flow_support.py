"""A model of engines and a trainer around the real loop, for its tests: no process, and a clock that jumps."""

from __future__ import annotations

import asyncio
import random

from milkweed.data import PromptStream
from milkweed.runs.generator import Generator, Limits
from milkweed.runs.virtual_time import run_virtual
from milkweed.types import PolicyVersion, Prompt, Sampling, Trajectory, VersionSpan


def prompts(n=50):
    return [Prompt(id=f"p{i}", messages=[{"role": "user", "content": str(i)}], token_ids=[1, 2]) for i in range(n)]


class World:
    """Engines that sample one token a `tick` under whatever version is served, and a trainer that takes `train_s`."""

    def __init__(self, limits, ledger, *, seed=0, mean=4.0, train_s=3.0, keep=None, fails=0.0, publish_s=0.2, version=PolicyVersion(), lineage=None, stream=None, **options):
        self.dice = random.Random(seed)
        self.limits, self.ledger = limits, ledger
        self.mean, self.train_s, self.publish_s, self.fails = mean, train_s, publish_s, fails
        self.version = self.served = version
        self.stream = stream or PromptStream(prompts())
        self.said = []
        self.batches = []
        self.generator = Generator(
            limits, self.stream, self.make, ledger, version=version, lineage=lineage, keep=keep, say=self.said.append, **options
        )

    async def make(self, prompt, issue, sample, attempt):
        length = max(1, round(self.dice.lognormvariate(0, 1) * self.mean))
        spans = []
        for n in range(length):
            await asyncio.sleep(0.1)
            if spans and spans[-1].version == self.served:
                spans[-1] = VersionSpan(spans[-1].start, n + 3, self.served)
            else:
                spans.append(VersionSpan(n + 2, n + 3, self.served))
        t = Trajectory(
            token_ids=[1, 2] + [5] * length,
            loss_mask=[False, False] + [True] * length,
            logprobs=[0.0, 0.0] + [-1.0] * length,
            versions=spans,
            turns=[],
            finish_reason="stop",
            sampling=Sampling(),
            id=f"{issue.group}/{sample}",
            group_id=issue.group,
            prompt_id=prompt.id,
            index=sample,
        )
        if self.dice.random() < self.fails:
            t.dropped = "environment raised ValueError: chance"
        else:
            t.reward = float(self.dice.random() < 0.5)
        return t

    async def step(self):
        groups = await self.generator.take(self.version)
        self.batches.append((self.version, groups))
        await asyncio.sleep(self.train_s)
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)
        self.generator.trained(self.version)
        if self.limits.staleness == 0:
            await self.publish()
        else:
            asyncio.get_running_loop().create_task(self.publish())

    async def publish(self):
        version = self.version
        await asyncio.sleep(self.publish_s)
        self.served = version
        self.generator.serve(version)


__all__ = ["Limits", "World", "prompts", "run_virtual"]
