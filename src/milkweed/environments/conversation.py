"""Many turns as one token-exact trajectory: what was sampled stays as it was sampled, and only new messages are
tokenised.

    rendered prompt | sampled, end token | new messages, opening of the next turn | sampled, end token | ...
    mask 0 ........ | 1 ................ | 0 ................................... | 1 ................

A sampled turn ends at an end token, at which every tokenizer splits, so that what follows has the same ids whatever
stands before. Where the template would now write earlier turns otherwise (it drops old thinking, say), the tokens held
are no longer what the model would be shown: a new segment begins, rendered whole, and the turns before stay trained in
theirs. White space that a template trims is no such change: the sampled ids stay.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from milkweed.data.tokenizer import Chat
from milkweed.environments.tool_calls import Parsed, ToolCall, describe, format_of, parse
from milkweed.environments.tools import Tool, as_tools, observe
from milkweed.errors import DataError, MilkweedError
from milkweed.types import Completion, FinishReason, Sampling, Trajectory, Turn, VersionSpan

Message = dict[str, Any]
Sample = Callable[[list[int], Sampling], Awaitable[Completion]]
MARK = "\u241fmilkweed\u241f"
"""Stands for a sampled message while the template is asked what comes after one."""


class LimitReached(MilkweedError):
    """A turn was asked for beyond a limit on turns, tokens or time."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a trajectory may become; None is no limit. `tokens` are those sampled over all turns. Whichever is met
    first ends it, and is its finish reason: "turns", "tokens" or "time"."""

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"limits.{name} must be above 0, not {value}")


class Reply(msgspec.Struct, kw_only=True):
    """One sampled turn. `text` is what was said beside tool calls, `raw` all of it without the end token. `message` is
    the turn in the form of OpenAI's API, to be appended to the messages. `errors` say what was wrong with malformed
    tool calls; there are no calls then."""

    text: str
    raw: str
    tool_calls: list[ToolCall]
    errors: list[str]
    message: Message
    completion: Completion

    @property
    def finish_reason(self) -> FinishReason:
        return self.completion.finish_reason

    def __str__(self) -> str:
        return self.text


class _Segment:
    """One sequence of ids with its text, and the messages that it holds."""

    def __init__(self, ids: list[int], text: str) -> None:
        self.ids, self.text = ids, text
        self.mask, self.logprobs = [False] * len(ids), [0.0] * len(ids)
        self.versions: list[VersionSpan] = []
        self.turns = [Turn("prompt", 0, len(ids))]
        self.ended = True
        """Whether the last sampled turn ended with an end token."""

    def extend(self, ids: Sequence[int], text: str, role: str) -> None:
        start = len(self.ids)
        self.ids += ids
        self.text += text
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.turns.append(Turn(role, start, len(self.ids)))

    def sampled(self, completion: Completion, text: str, ended: bool) -> None:
        start = len(self.ids)
        self.ids += completion.token_ids
        self.text += text
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += [VersionSpan(s.start + start, s.end + start, s.version) for s in completion.versions]
        self.turns.append(Turn("assistant", start, len(self.ids)))
        self.ended = ended


class Conversation:
    """A trajectory in the making. `sample(ids, sampling)` samples; `tools` are functions, `Tool`s or schemas.

    >>> talk = policy.talk(task.messages, tools=[calculator], limits=Limits(turns=4))
    >>> async for reply in talk:            # ends at a limit, or when nothing was added after a reply
    ...     await talk.run_tools(reply)     # adds an observation for every call
    >>> return talk.trajectory(reward=float(reply.text == task.answer))

    `history="keep"` never asks whether the template rewrites earlier turns: one segment, always. `announce=False` does
    not tell the model of its tools, which it is taken to know. Raises DataError where the template refuses the
    messages.
    """

    def __init__(
        self,
        chat: Chat,
        sample: Sample,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        agent: str = "",
        history: Literal["split", "keep"] = "split",
        announce: bool = True,
    ) -> None:
        self.chat, self.agent, self.history = chat, agent, history
        self.sampling, self.limits = sampling or Sampling(), limits or Limits()
        shared: dict[Any, Any] = {}
        self.tools: dict[str, Tool] = {t.name: t.session(shared) for t in as_tools(tools)}
        self.schemas = [t.schema for t in self.tools.values()]
        self.form = format_of(chat.template_source)
        self.messages: list[Message] = [dict(m) for m in messages]
        """In the form of OpenAI's API."""
        self.replies: list[Reply] = []
        self.finish: FinishReason | None = None
        """Why there will be no further turn; None while there may be."""
        self.error: str | None = None
        self._sample = sample
        self._raw: dict[int, str] = {}  # index of a message that was sampled -> its exact text
        self._held = 0  # messages that the current segment holds
        self._segment: _Segment | None = None
        self._closed: list[_Segment] = []
        self._ends: list[tuple[_Segment, int, int]] = []  # of every reply: its segment, and its length in ids and text
        self._rewards: list[tuple[_Segment, int, float]] = []
        self._seconds = self.limits.seconds
        self._began = asyncio.get_running_loop().time()
        self._announced = self.schemas if announce else []
        self._template_has_tools = bool(self._announced) and self._template_shows_tools()

    # ---- turns

    def add(self, *messages: Message | str) -> None:
        """Messages for the next turn to answer; text is a user's."""
        self.messages += [{"role": "user", "content": m} if isinstance(m, str) else dict(m) for m in messages]

    async def reply(self, *messages: Message | str) -> Reply | None:
        """Adds `messages` and samples the next turn. None, and `finish` set, where a limit allows no more."""
        self.add(*messages)
        if self.finish is None and self.limits.turns is not None and len(self.replies) >= self.limits.turns:
            self.finish = "turns"
        if self.finish is not None:
            return None
        segment = self._ready()
        budget = self._budget(segment)
        if budget < 1:
            self.finish = "tokens"
            return None
        sampling = self.sampling
        cut = budget < sampling.max_tokens
        if cut:
            sampling = msgspec.structs.replace(sampling, max_tokens=budget)
        try:
            async with asyncio.timeout(self._left()):
                completion = await self._sample(list(segment.ids), sampling)
        except TimeoutError:
            if self._left() is None or self._left() > 0:  # type: ignore[operator]
                raise
            self.finish = "time"
            return None
        return self._take(segment, completion, "tokens" if cut else "length")

    async def __aiter__(self) -> AsyncIterator[Reply]:
        while not self.replies or len(self.messages) > self._held:
            reply = await self.reply()
            if reply is None:
                return
            yield reply

    def _left(self) -> float | None:
        if self._seconds is None:
            return None
        return max(0.0, self._began + self._seconds - asyncio.get_running_loop().time())

    def _budget(self, segment: _Segment) -> int:
        room = [self.sampling.max_tokens]
        if self.limits.tokens is not None:
            room.append(self.limits.tokens - sum(len(r.completion.token_ids) for r in self.replies))
        if self.chat.context is not None:
            room.append(self.chat.context - len(segment.ids))
        return min(room)

    def _take(self, segment: _Segment, completion: Completion, cut: FinishReason) -> Reply:
        ids = completion.token_ids
        ended = bool(ids) and ids[-1] in self.chat.eos_ids
        raw = self.chat.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        # an end token other than the template's own is the template's in the text that is compared with it
        segment.sampled(
            completion, raw + (self.chat.decode([self.chat.eos_id], skip_special_tokens=False) if ended else ""), ended
        )
        self._ends.append((segment, len(segment.ids), len(segment.text)))
        parsed = parse(raw, self.form) if self.schemas else Parsed(content=raw)
        number = len(self.replies)
        calls = [msgspec.structs.replace(c, id=f"call_{number}_{i}") for i, c in enumerate(parsed.calls)]
        message: Message = {"role": "assistant", "content": parsed.content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)},
                }
                for c in calls
            ]
        self._raw[len(self.messages)] = raw
        self.messages.append(message)
        self._held = len(self.messages)
        reply = Reply(
            text=parsed.content, raw=raw, tool_calls=calls, errors=parsed.errors, message=message, completion=completion
        )
        self.replies.append(reply)
        if completion.finish_reason == "length":
            self.finish = cut  # half a message is nothing to go on from
        elif completion.finish_reason != "stop":
            self.finish, self.error = completion.finish_reason, completion.error
        return reply

    def reward(self, value: float) -> None:
        """What the last turn earned by itself; adds up. The trajectory's reward is the sum of these and its own."""
        if self._segment is None or not self.replies:
            raise ValueError("no turn was sampled yet that could be rewarded")
        self._rewards.append((self._segment, len(self._segment.turns) - 1, float(value)))

    async def run_tools(self, reply: Reply) -> bool:
        """Carries out the calls of `reply`, one after the other, and adds an observation for each; for malformed calls,
        what was wrong. Returns whether anything was added. Raises EnvironmentFailed where a tool itself is broken."""
        for error in reply.errors:
            self.add({"role": "tool", "content": f"error: {error}"})
        for call in reply.tool_calls:
            seen = await observe(self.tools, call)
            self.add({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": seen})
        return bool(reply.errors or reply.tool_calls)

    async def close(self) -> None:
        """Ends what its tools hold; the loop calls it when the environment has returned."""
        for one in self.tools.values():
            await one.close()

    # ---- rendering

    def _template_shows_tools(self) -> bool:
        probe = [{"role": "user", "content": "?"}]
        return self.chat.text(probe, tools=self.schemas) != self.chat.text(probe)

    def _render(self, messages: Sequence[Message], marked: int = -1) -> str:
        """As the template writes them: sampled ones with their exact text (MARK for the one numbered `marked`), tools
        where it has no place for them told in the system message."""
        raw = self._raw | ({marked: MARK} if marked >= 0 else {})
        shown = [{"role": "assistant", "content": raw[i]} if i in raw else m for i, m in enumerate(messages)]
        if self._announced and not self._template_has_tools:
            told = describe(self._announced, self.form)
            if shown and shown[0].get("role") == "system":
                shown[0] = shown[0] | {"content": f"{shown[0].get('content', '')}\n\n{told}"}
            else:
                shown.insert(0, {"role": "system", "content": told})
        return self.chat.text(shown, **({"tools": self.schemas} if self._template_has_tools else {}))

    def _ready(self) -> _Segment:
        """The segment with all messages in it, opened for the next turn."""
        segment = self._segment
        if segment is None or not self.replies:
            text = self._render(self.messages)
            segment = _Segment(self.chat.encode(text), text)
        else:
            segment = self._go_on(segment)
        self._segment = segment
        self._held = len(self.messages)
        return segment

    def _go_on(self, segment: _Segment) -> _Segment:
        new = self.messages[self._held :]
        role = new[0]["role"] if new else "assistant"
        whole = self._render(self.messages) if self.history == "split" else None
        if whole is not None and segment.ended and whole.startswith(segment.text):
            rest = whole[len(segment.text) :]
            segment.extend(self.chat.encode(rest), rest, role)
            return segment
        rest = self._after_a_turn(new, segment.ended)
        if whole is None or _squashed(whole) == _squashed(segment.text + rest):
            segment.extend(self.chat.encode(rest), rest, role)
            return segment
        _warn_of_rewriting(self.chat)
        self._closed.append(segment)
        return _Segment(self.chat.encode(whole), whole)

    def _after_a_turn(self, new: Sequence[Message], ended: bool) -> str:
        """What the template writes after a sampled turn: its end mark, unless that was sampled, and `new`."""
        text = self._render(self.messages[: self._held] + list(new), marked=self._held - 1)
        _, found, rest = text.rpartition(MARK)
        if not found:
            raise DataError(
                f"{self.chat.folder}: its chat template does not show the assistant's message, so no turn can follow one"
            )
        marks = [self.chat.decode([i], skip_special_tokens=False) for i in self.chat.eos_ids]
        mark = next((m for m in marks if m and rest.startswith(m)), "")
        return rest[len(mark) :] if ended else rest

    # ---- the trajectory

    def fork(self, replies: int) -> Conversation:
        """A conversation that goes on from just after this one's first `replies` turns (at least one). What was sampled
        until there stands in it as it is, and is trained here only."""
        other = Conversation.__new__(Conversation)
        other.__dict__.update(self.__dict__)
        at = sorted(self._raw)[replies - 1]
        other.messages, other.replies, other._held = self.messages[: at + 1], self.replies[:replies], at + 1
        other._raw = {i: t for i, t in self._raw.items() if i <= at}
        other._closed, other._rewards, other.finish, other.error = [], [], None, None
        segment, length, letters = self._ends[replies - 1]
        other._segment = made = _Segment(segment.ids[:length], segment.text[:letters])
        made.turns = [Turn(t.role, t.start, t.end) for t in segment.turns if t.end <= length]
        made.ended = made.ids[-1] in self.chat.eos_ids
        other._ends = [*self._ends[: replies - 1], (made, length, letters)]
        return other

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(len(r.completion.token_ids) for r in self.replies)

    def trajectory(self, reward: float | None = None, parts: dict[str, float] | None = None) -> Trajectory:
        """What was sampled, scored with `reward` and the rewards of its turns (no reward at all leaves it unscored).
        One that an engine cut short is dropped with its reason."""
        segments = [*self._closed, *([self._segment] if self._segment else [])]
        if not segments:
            text = self._render(self.messages)
            segments = [_Segment(self.chat.encode(text), text)]
        earned = sum(value for _, _, value in self._rewards)
        total = None if reward is None and not self._rewards else (reward or 0.0) + earned
        finish = self.finish or "stop"
        made = [self._as_trajectory(s, finish) for s in segments]
        last = made[-1]
        last.segments = made[:-1]
        last.reward, last.reward_parts = total, parts or {}
        if finish in ("abort", "error"):
            last.error = self.error
            last.dropped = f"sampling ended with {finish}: {self.error or 'no cause given'}"
        elif not any(any(t.loss_mask) for t in made):
            last.dropped = "nothing was sampled"
        return last

    def _as_trajectory(self, segment: _Segment, finish: FinishReason) -> Trajectory:
        turns = list(segment.turns)
        for owner, number, value in self._rewards:
            if owner is segment:
                turn = turns[number]
                turns[number] = Turn(turn.role, turn.start, turn.end, (turn.reward or 0.0) + value)
        first = segment.mask.index(True) if True in segment.mask else len(segment.ids)
        return Trajectory(
            token_ids=list(segment.ids),
            loss_mask=list(segment.mask),
            logprobs=list(segment.logprobs),
            versions=list(segment.versions),
            turns=turns,
            finish_reason=finish,
            sampling=self.sampling,
            completion=self.chat.decode(segment.ids[first:], skip_special_tokens=False),
            agent=self.agent,
        )


def _squashed(text: str) -> str:
    return "".join(text.split())


_warned: set[str] = set()


def _warn_of_rewriting(chat: Chat) -> None:
    if str(chat.folder) not in _warned:
        _warned.add(str(chat.folder))
        warnings.warn(
            f"{chat.folder}: its chat template rewrites earlier turns (drops thinking, say), so trajectories of many turns "
            'are split into segments; they count once. history="keep" trains them as one sequence instead',
            stacklevel=2,
        )
