"""A frozen model on engines of its own that says how likely given tokens are, in the words of a trainer's handle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from milkweed.errors import ConfigError
from milkweed.rollout.protocol import EngineReply
from milkweed.rollout.router import Router
from milkweed.types import Batch

if TYPE_CHECKING:
    import torch


class Teacher:
    """Scores batches as `Trainer.logprobs` and `Trainer.top_logprobs` do, by engines: each packed sequence is a request
    of its own. SGLang takes the log-probs of given tokens at temperature 1 only, so a batch of another is refused with
    ConfigError; a reference actor (`reference=`) scores at any."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-prob of each token given what precedes it in its own sequence, float32 `[rows, seq]`; 0 at a sequence's
        first token and on padding. Raises ConfigError (see above), and as `Router.sample` does."""
        import torch

        out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for here, reply in await self._score(batch, 0):
            out[here] = torch.tensor(reply.logprobs)
        return out

    async def top_logprobs(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (int64) and log-probs (over the full vocabulary) of the `k` likeliest words for each token, best first,
        both `[rows, seq, k]`; 0 at a sequence's first token and on padding. Raises as `logprobs`."""
        import torch

        if k < 1:
            raise ConfigError(f"top_logprobs: k must be at least 1, not {k}")
        ids = torch.zeros(*batch.tokens.shape, k, dtype=torch.int64)
        out = torch.zeros(*batch.tokens.shape, k, dtype=torch.float32)
        for here, reply in await self._score(batch, k):
            if reply.top_ids:
                rest = tuple(part[1:] for part in here)
                ids[rest], out[rest] = torch.tensor(reply.top_ids), torch.tensor(reply.top_logprobs)
        return ids, out

    async def _score(self, batch: Batch, top: int) -> list[tuple[tuple[torch.Tensor, torch.Tensor], EngineReply]]:
        """Of each sequence: where its tokens stand (rows, columns), and what the engines say of them."""
        if batch.temperature != 1.0:
            raise ConfigError(
                f"a teacher on engines scores at temperature 1, not {batch.temperature:g}: ask at 1, or bring the "
                "teacher up as a reference actor (reference=FOLDER)"
            )
        places = [(batch.segments == s).nonzero(as_tuple=True) for s in batch.segments.unique().tolist() if s >= 0]
        score = self.router.score
        asked = [score(batch.tokens[here].tolist(), top, name=f"of row {int(here[0][0])}") for here in places]
        return list(zip(places, await asyncio.gather(*asked), strict=True))

    async def close(self) -> None:
        await self.router.close()
