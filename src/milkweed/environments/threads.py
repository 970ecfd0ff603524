"""Chat calls that bring their whole history each time, joined into token-exact conversations by the messages they
share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from milkweed.data.tokenizer import Chat
from milkweed.environments.conversation import Conversation, LimitReached, Limits, Message, Reply, Sample
from milkweed.environments.tools import as_tools
from milkweed.errors import DataError
from milkweed.types import Completion, Sampling, Trajectory, Turn


class Threads:
    """The conversations of one sample of one player.

    A call whose messages begin with those of an earlier reply goes on from that reply's exact ids. One that goes on
    from an earlier point than the last is a branch: what it shares is context there, and trained where it was sampled.
    One that shares nothing, or has other tools or another sampling support, begins anew. All are segments of one
    trajectory.
    """

    def __init__(
        self,
        chat: Chat,
        sample: Sample,
        sampling: Sampling,
        *,
        limits: Limits | None = None,
        agent: str = "",
        announce: bool = True,
    ) -> None:
        self.announce = announce
        self._chat, self._sample, self._sampling, self._limits, self.agent = chat, sample, sampling, limits, agent
        self._at: dict[bytes, tuple[Conversation, int]] = {}
        self._busy: set[int] = set()
        self.conversations: list[Conversation] = []
        self.completions: list[Completion] = []
        """Of bare ids, without messages."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), sampling: Sampling | None = None
    ) -> Reply:
        """The next message. Raises LimitReached where a limit allows none, DataError for messages that no text model
        can be shown."""
        sampling = sampling or self._sampling
        messages = [plain_message(m) for m in messages]
        offered = as_tools(tools)
        support = [sampling.temperature, sampling.top_p, sampling.top_k, [t.schema for t in offered]]
        digests = _digests(messages, support)
        talk, new = self._find(digests, messages)
        if talk is None:
            talk = Conversation(
                self._chat,
                self._sample,
                messages,
                tools=offered,
                sampling=sampling,
                limits=self._limits,
                agent=self.agent,
                announce=self.announce,
            )
            self.conversations.append(talk)
        talk.sampling = sampling
        self._busy.add(id(talk))
        try:
            reply = await talk.reply(*new)
        finally:
            self._busy.discard(id(talk))
        if reply is None:
            raise LimitReached(f"no further turn: the limit on {talk.finish} is reached")
        self._at[_digest(digests[-1], reply.message)] = (talk, len(talk.replies))
        return reply

    def _find(self, digests: list[bytes], messages: list[Message]) -> tuple[Conversation | None, list[Message]]:
        for known in range(len(messages), 0, -1):
            talk, replies = self._at.get(digests[known], (None, 0))
            if talk is None or talk.replies[replies - 1].finish_reason != "stop":
                continue
            if replies != len(talk.replies) or id(talk) in self._busy or len(talk.messages) > known:
                talk = talk.fork(replies)
                self.conversations.append(talk)
            return talk, messages[known:]
        return None, []

    async def complete(self, token_ids: list[int], sampling: Sampling | None = None) -> Completion:
        """One completion of bare ids; those that begin with all ids of an earlier one are its next turn."""
        completion = await self._sample(token_ids, sampling or self._sampling)
        self.completions.append(completion)
        return completion

    def trajectory(self, reward: float | None = None, parts: dict[str, float] | None = None) -> Trajectory:
        """All of it as one sample: the conversation replied in last, the others as its segments. Raises DataError where
        nothing was asked for."""
        made = [*joined(self.completions), *(t.trajectory(reward) for t in self.conversations if t.replies)]
        if not made:
            raise DataError("no trajectory: nothing was sampled in this session")
        last = made[-1]
        last.segments = [s for t in made[:-1] for s in t.sequences] + last.segments
        for segment in last.segments:
            segment.segments = []
        lost = next((t for t in made if t.finish_reason in ("abort", "error")), None)
        if lost is not None and lost is not last:
            last.dropped, last.error = lost.dropped or f"sampling ended with {lost.finish_reason}", lost.error
        last.reward, last.reward_parts = reward if reward is not None else last.reward, parts or {}
        last.agent = self.agent
        return last


def joined(completions: Sequence[Completion]) -> list[Trajectory]:
    """Bare completions as trajectories; one whose prompt begins with all ids of an earlier one is its next turn."""
    made: list[Trajectory] = []
    for completion in completions:
        ids = completion.prompt_ids
        before = next(
            (t for t in reversed(made) if t.finish_reason == "stop" and ids[: len(t.token_ids)] == t.token_ids), None
        )
        whole = completion.trajectory()
        if before is not None:
            n = len(before.token_ids)
            whole.loss_mask[:n], whole.logprobs[:n] = before.loss_mask, before.logprobs
            whole.versions[:0] = before.versions
            whole.turns[:1] = [*before.turns, Turn("prompt", n, len(ids))]
            made.remove(before)
        made.append(whole)
    return made


def plain_message(message: Message) -> Message:
    """`message` with its content as text. Raises DataError for what is no text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"not a message: {str(message)[:80]}; it needs a role")
    content = message.get("content")
    if isinstance(content, list):
        kinds = {p.get("type") for p in content if isinstance(p, dict)} - {"text"}
        if kinds or not all(isinstance(p, dict) for p in content):
            raise DataError(
                f"a message of role {message['role']} has content of type {', '.join(map(str, kinds))}; only text is taken"
            )
        content = "".join(str(p.get("text", "")) for p in content)
    elif content is not None and not isinstance(content, str):
        raise DataError(f"a message of role {message['role']} has content that is a {type(content).__name__}, not text")
    plain = {k: v for k, v in message.items() if v is not None} | {"content": content or ""}
    if plain.get("tool_calls"):  # templates write arguments out themselves
        plain["tool_calls"] = [_with_parsed_arguments(c) for c in plain["tool_calls"]]
    return plain


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _digests(messages: Sequence[Message], support: Any) -> list[bytes]:
    """Of nothing, of the first message, of the first two, ..."""
    found = [hashlib.blake2b(json.dumps(support, sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        found.append(_digest(found[-1], message))
    return found


def _digest(before: bytes, message: Message) -> bytes:
    """What makes a message the same one when a client sends it back: clients strip text, drop ids, and write a call's
    arguments in their own order."""
    calls = [
        (f.get("name"), f.get("arguments"))
        for f in (_with_parsed_arguments(c).get("function", {}) for c in message.get("tool_calls") or [])
    ]
    same = [message["role"], (message.get("content") or "").strip(), calls]
    return hashlib.blake2b(before + json.dumps(same, sort_keys=True).encode(), digest_size=16).digest()
