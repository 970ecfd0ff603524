"""The values that pass between the parts: prompts, completions, trajectories, groups, batches, versions.

A trajectory is built once, from the ids that were sampled, and is never tokenised again. All per-token fields are
aligned with `token_ids`: `logprobs[t]` is the log-probability of `token_ids[t]` given everything before it, and
`loss_mask[t]` says whether the policy sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error", "turns", "tokens", "time"]
"""stop: it ended by itself. length: a completion was cut at its `max_tokens`. turns, tokens, time: an environment's limit.
abort, error: cut short by us or by a fault; never trained as if it were the policy's doing."""


class PolicyVersion(msgspec.Struct, frozen=True, order=True):
    """Names one set of weights. `step` counts optimiser steps applied; `incarnation` changes when a run goes back
    to a checkpoint, so that a version never names two sets of weights. Written `incarnation.step`."""

    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str`. Raises ValueError on anything else."""
        incarnation, _, step = text.partition(".")
        return cls(int(incarnation), int(step))


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `start:end` (positions in `token_ids`) were sampled under `version`."""

    start: int
    end: int
    version: PolicyVersion


class Turn(msgspec.Struct, frozen=True):
    """Tokens `start:end` of a trajectory belong to one message of `role`. `reward` is what that turn alone earned."""

    role: str
    start: int
    end: int
    reward: float | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, and with it the support over which log-probabilities are taken.

    Log-probabilities are those of the full vocabulary at `temperature` (0 means greedy, log-probs at temperature 1).
    With `top_p < 1` or `top_k > 0` tokens come from a smaller set than the log-probs' support, so they must not be
    used in a ratio against the trainer's.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"sampling.temperature must be 0 (greedy) or above, not {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k must be 0 (off) or above, not {self.top_k}")

    @property
    def full_support(self) -> bool:
        """True where the sampled tokens' log-probs may be used in a ratio."""
        return self.top_p == 1.0 and self.top_k == 0 and self.temperature > 0


class Prompt(msgspec.Struct, kw_only=True):
    """One task to train or evaluate on.

    `id` is unique within its source and stable between runs. `messages` is the chat (role and content). `answer` and
    `info` are for whoever scores. `token_ids` are the rendered prompt, filled by the data layer.
    """

    id: str
    messages: list[dict[str, Any]]
    answer: Any = None
    info: dict[str, Any] = {}
    token_ids: list[int] = []

    @property
    def text(self) -> str:
        """The contents of the messages, for people."""
        return "\n".join(str(m.get("content", "")) for m in self.messages)


class Completion(msgspec.Struct, kw_only=True):
    """What an engine returned for one request. `token_ids` and `logprobs` have the same length; `versions` are spans
    over `token_ids`. `text` is for people and verifiers and is never tokenised again."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[VersionSpan]
    sampling: Sampling
    text: str = ""
    engine: str = ""
    cached_tokens: int = 0
    error: str | None = None

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that sampled a token of it."""
        return min((s.version for s in self.versions), default=PolicyVersion())

    def trajectory(self, reward: float | None = None, parts: dict[str, float] | None = None) -> Trajectory:
        """This completion as a trajectory of one turn, scored with `reward` if given."""
        n, m = len(self.prompt_ids), len(self.token_ids)
        return Trajectory(
            token_ids=self.prompt_ids + self.token_ids,
            loss_mask=[False] * n + [True] * m,
            logprobs=[0.0] * n + list(self.logprobs),
            versions=[VersionSpan(s.start + n, s.end + n, s.version) for s in self.versions],
            turns=[Turn("prompt", 0, n), Turn("assistant", n, n + m)],
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            reward=reward,
            reward_parts=parts or {},
            completion=self.text,
            error=self.error,
        )


class Trajectory(msgspec.Struct, kw_only=True):
    """One sample of the policy, of one turn or many. Identity fields are filled by the loop that asked for it.

    `reward` None means it was not scored, and `dropped` then says why: it is never trained and never counted as zero.
    It is the whole: rewards of turns (`Turn.reward`) and what came at the end. `agent` names the player where an
    environment has several. Where one sequence of tokens cannot hold it (the chat template rewrites earlier turns, or a
    turn was asked for twice) `segments` are its other sequences: the same sample, with the same reward, counted once.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[VersionSpan]
    turns: list[Turn]
    finish_reason: FinishReason
    sampling: Sampling
    id: str = ""
    prompt_id: str = ""
    group_id: str = ""
    index: int = 0
    seed: int | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    completion: str = ""
    error: str | None = None
    dropped: str | None = None
    agent: str = ""
    segments: list[Trajectory] = []

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.loss_mask) != n or len(self.logprobs) != n:
            raise ValueError(
                f"trajectory {self.id or '?'}: {n} token_ids, {len(self.loss_mask)} loss_mask, {len(self.logprobs)} logprobs"
            )

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that sampled a token of it."""
        spans = [s.version for t in self.sequences for s in t.versions]
        return min(spans, default=PolicyVersion())

    @property
    def sequences(self) -> list[Trajectory]:
        """Every sequence of tokens that is trained for it: its segments, then itself."""
        return [*self.segments, self]

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled, those of all segments."""
        return sum(sum(t.loss_mask) for t in self.sequences)


class Group(msgspec.Struct, kw_only=True):
    """The trajectories of one prompt, which share a baseline. Grouping is by `id`, never by content."""

    id: str
    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.reward is not None and t.dropped is None]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None and t.dropped is None]


class Policy(Protocol):
    """What an environment knows of the policy: a handle that samples."""

    async def sample(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One completion of `token_ids` under the handle's sampling (or the one given)."""
        ...

    async def chat(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[Any] = (), **options: Any) -> Any:
        """The next message after `messages`: a `Reply`. Earlier replies among them stand with the ids that were sampled."""
        ...


Environment = Callable[[Prompt, Policy], Awaitable["Trajectory | Sequence[Trajectory]"]]
"""`async def env(task, policy) -> Trajectory`: samples from the policy and scores what came. Several trajectories, told
apart by `agent`, are several players: each is compared with the same player's other samples of the prompt."""


@dataclass
class Batch:
    """Sequences packed into rows, ready to train on. Every tensor is `[rows, seq]` and aligned with `tokens`: entry
    `t` speaks of token `t` (its log-prob given what precedes it in its own sequence), never of the next one.

    The loss of the whole batch is `sum(weights * token_loss)` over all rows of all ranks and micro-batches, so it
    does not depend on how the rows were split. `weights` already hold the normaliser (for token normalisation
    `1 / totals["tokens"]` where `mask` is set) and are 0 wherever `mask` is False.
    """

    tokens: torch.Tensor
    """int64; 0 on padding."""
    positions: torch.Tensor
    """int64; restart at 0 with every sequence."""
    segments: torch.Tensor
    """int64; index of the sequence in the whole batch, -1 on padding. A sequence never spans two rows."""
    mask: torch.Tensor
    """bool; tokens that are trained. Never set on the first token of a sequence."""
    weights: torch.Tensor
    """float32."""
    logprobs: torch.Tensor
    """float32; behaviour log-probs (of the engine that sampled), 0 where not sampled."""
    advantages: torch.Tensor
    """float32."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further `[rows, seq]` tensors by name: `reference_logprobs`, `old_logprobs`, `returns`, `values`, ..."""
    totals: dict[str, float] = field(default_factory=dict)
    """Counts over the whole global batch: `tokens` (trained), `sequences`, `groups`."""
    temperature: float = 1.0
    """The policy's logits are divided by it, as the engine's were."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickled as arrays, in a fraction of the time that tensors take: a batch travels in every step."""
        return {k: _frozen(v) if k != "extra" else {n: _frozen(x) for n, x in v.items()} for k, v in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({k: _thawed(v) if k != "extra" else {n: _thawed(x) for n, x in v.items()} for k, v in state.items()})

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every `[rows, seq]` tensor by name, those of `extra` too."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("extra", "totals", "temperature")}
        return own | self.extra

    def select(self, rows: slice | Sequence[int]) -> Batch:
        """The batch of these rows only; `totals` stay those of the whole."""
        pick = {n: getattr(self, n)[rows] for n in self.tensors() if n not in self.extra}
        return Batch(**pick, extra={k: v[rows] for k, v in self.extra.items()}, totals=self.totals, temperature=self.temperature)


def _frozen(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:  # which numpy does not know
        return value.detach().cpu().numpy()
    return value


def _thawed(value: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class PolicyOutput(Protocol):
    """What a loss sees of the forward pass on a (micro-)batch. Tensors are fp32 and aligned with `batch.tokens`."""

    logprobs: torch.Tensor
    """`[rows, seq]` log-prob of each token under the policy at `batch.temperature`; 0 at a sequence's first token."""

    def entropy(self) -> torch.Tensor:
        """`[rows, seq]` entropy over the full vocabulary of the distribution each token was drawn from."""
        ...

    def logits(self) -> torch.Tensor:
        """`[rows, seq, vocab]` the logits that each token was drawn from, divided by the temperature."""
        ...


Loss = Callable[[Batch, PolicyOutput], "torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""`loss(batch, policy)` returns the loss of each token `[rows, seq]`, which the trainer multiplies by `batch.weights`
and sums; or a scalar, taken as this micro-batch's share of the sum (for losses over pairs: normalise by
`batch.totals`). A second value, a dict of `[rows, seq]` tensors, becomes metrics: their means over trained tokens."""
