"""The trainer's Monarch actor: one `TrainerRank` in each process, called from the controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from milkweed.fleet.memory import freeze
from milkweed.fleet.monarch_compat import Actor, endpoint
from milkweed.training.config import TrainerConfig


class TrainerActor(Actor):
    """Every endpoint answers `(value, seconds)`; the seconds are this rank's own, without the call around them.

    The rank is made by `start`, not by the constructor: an actor whose constructor raises is dead, and what it raised
    would reach the controller as text only.
    """

    def __init__(self) -> None:
        self._rank: Any = None

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        value = work()
        return value, time.perf_counter() - started

    @endpoint
    def start(
        self, model: str, config: TrainerConfig, run_dir: str | None, optimise: bool, head: str, copies: str | None
    ) -> tuple[dict[str, Any], float]:
        """Build the policy (or critic); its statistics. Raises ConfigError or DataError."""
        from milkweed.training.rank import TrainerRank

        def work() -> dict[str, Any]:
            self._rank = TrainerRank(model, config, run_dir=run_dir, optimise=optimise, head=head, copies=copies)
            freeze()
            return self._rank.stats()

        return self._timed(work)

    @endpoint
    def update(self, batch: Any, loss: bytes, clip_norm: float | None) -> tuple[dict[str, Any], float]:
        """See TrainerRank.update; `loss` as `shipping.ship` packed it. The answer has the new version and the log-probs before the update besides."""
        from milkweed.training.shipping import unship

        def work() -> dict[str, Any]:
            metrics = self._rank.update(batch, unship(loss), clip_norm=clip_norm)
            return {"metrics": metrics, "version": self._rank.version, "logprobs": self._rank.trained}

        return self._timed(work)

    @endpoint
    def logprobs(self, batch: Any) -> tuple[Any, float]:
        """See TrainerRank.logprobs."""
        return self._timed(lambda: self._rank.logprobs(batch))

    @endpoint
    def values(self, batch: Any) -> tuple[Any, float]:
        """See TrainerRank.values."""
        return self._timed(lambda: self._rank.values(batch))

    @endpoint
    def top_logprobs(self, batch: Any, k: int) -> tuple[Any, float]:
        """See TrainerRank.top_logprobs."""
        return self._timed(lambda: self._rank.top_logprobs(batch, k))

    @endpoint
    def publish(self, readers: list[str], dtype: str | None, ttl_s: float) -> tuple[Any, float]:
        """See TrainerRank.publish."""
        return self._timed(lambda: self._rank.publish(readers, dtype=dtype, ttl_s=ttl_s))

    @endpoint
    def release(self, reader: str, version: Any) -> tuple[None, float]:
        """See TrainerRank.release."""
        return self._timed(lambda: self._rank.release(reader, version))

    @endpoint
    def adopt(self, layout: bytes, dtype: str) -> tuple[Any, float]:
        """See Sender.adopt."""
        return self._timed(lambda: self._rank.send("adopt", layout, dtype))

    @endpoint
    def reaches(self, grant: Any) -> tuple[bool, float]:
        """See Sender.reaches."""
        return self._timed(lambda: self._rank.send("reaches", grant))

    @endpoint
    def place(self, grants: list[Any], layout: str, dtype: str) -> tuple[int, float]:
        """See Sender.place."""
        return self._timed(lambda: self._rank.send("place", grants, layout, dtype))

    @endpoint
    def publish_packed(self, readers: list[str], ttl_s: float, layout: str, dtype: str) -> tuple[Any, float]:
        """See Sender.publish."""
        return self._timed(lambda: self._rank.send("publish", self._rank.version, readers, ttl_s, layout, dtype))

    @endpoint
    def chunk(self, rank: int, version: Any, number: int) -> tuple[bytes, float]:
        """The bytes of one chunk of what rank `rank` published; nothing from the others."""
        if rank != self._rank.rank:
            return b"", 0.0
        return self._timed(lambda: self._rank.sender.publisher.chunk(version, number))

    @endpoint
    def save(self, state: str) -> tuple[str, float]:
        """See TrainerRank.save."""
        return self._timed(lambda: self._rank.save(state))

    @endpoint
    def saved(self, wait: bool) -> tuple[bool, float]:
        """See TrainerRank.saved."""
        return self._timed(lambda: self._rank.saved(wait=wait))

    @endpoint
    def load(self, incarnation: int | None, step: int | None) -> tuple[dict[str, Any], float]:
        """See TrainerRank.load. The answer has the version besides."""

        def work() -> dict[str, Any]:
            state = self._rank.load(incarnation, step)
            return {"state": state, "version": self._rank.version, "peak_lr": self._rank.peak_lr, "broken": self._rank.checkpoints.broken}

        return self._timed(work)

    @endpoint
    def copy(self) -> tuple[None, float]:
        """See TrainerRank.copy."""
        return self._timed(lambda: self._rank.copy())

    @endpoint
    def copied(self) -> tuple[bool, float]:
        """See TrainerRank.copied."""
        return self._timed(lambda: self._rank.copied())

    @endpoint
    def restore(self, incarnation: int, step: int) -> tuple[Any, float]:
        """See TrainerRank.restore."""
        return self._timed(lambda: self._rank.restore(incarnation, step))

    @endpoint
    def export(self, folder: str, dtype: str) -> tuple[int, float]:
        """See TrainerRank.export."""
        return self._timed(lambda: self._rank.export(folder, dtype=dtype))

    @endpoint
    def set_lr(self, lr: float) -> tuple[float, float]:
        """See TrainerRank.set_lr."""
        return self._timed(lambda: self._rank.set_lr(lr))

    @endpoint
    def checksum(self) -> tuple[str, float]:
        """See TrainerRank.checksum."""
        return self._timed(lambda: self._rank.checksum())

    @endpoint
    def stats(self) -> tuple[dict[str, Any], float]:
        """See TrainerRank.stats."""
        return self._timed(lambda: self._rank.stats())

    @endpoint
    def close(self) -> tuple[None, float]:
        """See TrainerRank.close."""
        return self._timed(lambda: self._rank.close() if self._rank is not None else None)
