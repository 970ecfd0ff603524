"""A policy that a function speaks for: plays an environment to make demonstrations of it, or to test it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from milkweed.data.tokenizer import Chat
from milkweed.types import Completion, PolicyVersion, Sampling


class Expert:
    """Stands where a router does. `say(text)` gets all that was said so far, special tokens written out, and returns
    the next message; its tokens are the tokenizer's, with the end token, and its log-probs are 0.

    >>> groups = await sample_groups(env, prompts, Expert(chat, say), chat=chat, samples=1, sampling=Sampling(),
    key="shown")
    >>> batch = pack([t for g in groups for t in g.trajectories])     # to imitate: algorithms.sft_loss()
    """

    def __init__(self, chat: Chat, say: Callable[[str], str]) -> None:
        self.chat, self.say, self.version = chat, say, PolicyVersion()

    async def sample(self, token_ids: Sequence[int], sampling: Sampling | None = None, **_: Any) -> Completion:
        sampling = sampling or Sampling()
        said = self.say(self.chat.decode(token_ids, skip_special_tokens=False))
        ids = [*self.chat.encode(said), self.chat.eos_id]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Completion(
            prompt_ids=list(token_ids),
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            finish_reason="length" if cut else "stop",
            versions=[],
            sampling=sampling,
            text=said,
            engine="expert",
        )
