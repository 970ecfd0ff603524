"""Which engine holds the KV of which prompts, as far as the router can know, and what that is worth against load.

A prompt is cut into blocks; each block's number is made of its tokens, all tokens before it and the version of the
weights, so that numbers of an older version never match. An engine is taken to hold what it was given and what it
sampled, the latest of it as far as its pool of KV has room: what SGLang's prefix cache does, up to its own evictions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from milkweed.rollout.records import Engine, Pending
from milkweed.types import PolicyVersion

BLOCK = 32
"""Tokens that are looked up together; a shorter prefix is not worth the way."""
LOOKS = 16
"""Of as many engines that hold equally much, the best is taken; beyond that the least busy of all holds as much, or nearly."""
POOL_TOKENS = 65536
"""What an engine is taken to hold where it does not say."""


def blocks(version: PolicyVersion, token_ids: Sequence[int]) -> list[int]:
    """The number of each whole block of `token_ids`."""
    number = hash((version.incarnation, version.step))
    raw, size = array("q", token_ids).tobytes(), BLOCK * 8
    numbers = []
    for start in range(0, len(raw) - size + 1, size):
        number = hash((number, raw[start : start + size]))
        numbers.append(number)
    return numbers


class Prefixes:
    """Chooses engines by load and by what they hold. `weight` samples in flight are outweighed by 1000 tokens held."""

    def __init__(self, weight: float) -> None:
        self._gain = weight * BLOCK / 1000
        self._holders: dict[int, dict[Engine, None]] = {}
        self._held: dict[Engine, OrderedDict[int, None]] = {}
        self.hits = 0
        """Samples that went where (some of) their prefix was."""
        self.passed = 0
        """Samples whose prefix was held, but only by engines that were too busy."""

    def choose(self, p: Pending, version: PolicyVersion, least: Engine, room: int) -> Engine:
        """The engine for `p`: `least` is the one with the fewest samples in flight, and no other is chosen that has
        `room` or more."""
        if not self._gain or p.request.score is not None:  # scoring computes all of its tokens
            return least
        if p.blocks is None or p.blocks[0] != version:
            p.blocks = (version, blocks(version, p.request.token_ids))
        best, cost, found = least, float(len(least.pending)), False
        for depth in range(len(p.blocks[1]), 0, -1):
            gain = self._gain * depth
            if len(least.pending) - gain >= cost:
                break  # none is less busy, and none holds more
            holders = self._holders.get(p.blocks[1][depth - 1], ())
            for engine in (least,) if least in holders else islice(holders, LOOKS):
                found = found or engine.usable
                open_ = engine is least or (engine.usable and len(engine.pending) < room)
                if open_ and len(engine.pending) - gain < cost:
                    best, cost = engine, len(engine.pending) - gain
            if least in holders:
                break
        self.hits += cost < len(best.pending)
        self.passed += found and cost >= len(best.pending)
        return best

    def given(self, engine: Engine, p: Pending) -> None:
        """`engine` computes the prompt of `p`."""
        if p.blocks is not None:
            self._hold(engine, p.blocks[1])

    def sampled(self, engine: Engine, p: Pending, token_ids: Sequence[int]) -> None:
        """`engine` has sampled `token_ids`, under the version that it serves; the last one's KV is not there."""
        if p.blocks is not None and len(token_ids) > 1:
            self._hold(engine, blocks(engine.stats.version, [*p.request.token_ids, *token_ids[:-1]]))

    def forget(self, engine: Engine) -> None:
        """`engine` is gone."""
        for number in self._held.pop(engine, ()):
            self._drop(engine, number)

    def _hold(self, engine: Engine, numbers: Sequence[int]) -> None:
        held = self._held.setdefault(engine, OrderedDict())
        for number in reversed(numbers):  # the end of a prefix is evicted before its beginning
            if number in held:
                held.move_to_end(number)
            else:
                held[number] = None
                self._holders.setdefault(number, {})[engine] = None
        most = (engine.stats.pool_tokens or POOL_TOKENS) // BLOCK
        while len(held) > most:
            self._drop(engine, held.popitem(last=False)[0])

    def _drop(self, engine: Engine, number: int) -> None:
        holders = self._holders[number]
        del holders[engine]
        if not holders:
            del self._holders[number]
