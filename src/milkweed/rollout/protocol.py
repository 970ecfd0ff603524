"""What the controller and an engine say to each other: requests, replies and reports, as msgspec structs.

One message carries many requests or replies, encoded once as MessagePack, so that a step of hundreds of samples costs
the controller a handful of small messages.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from milkweed.errors import MilkweedError
from milkweed.types import FinishReason, PolicyVersion, Sampling, VersionSpan

EngineState = Literal["serving", "broken", "dead"]
"""serving: whole weights of one version. broken: a commit and its roll-back both failed; nothing is served until a
commit succeeds. dead: a process of the engine is gone or does not answer; it never serves again."""


EngineRole = Literal["whole", "prefill", "decode"]
"""whole: an engine that samples by itself. prefill: it computes prompts and sends their KV away. decode: it samples from
KV that it is sent."""


Blame = Literal["request", "sampling", "engine", "pair"]


class SampleError(MilkweedError):
    """An engine failed at one request, and at no other; the message names the sample."""


class EngineSpec(msgspec.Struct, kw_only=True):
    """What an engine is made of. `model` is a Hugging Face folder on the engine's host, whose weights are `version`;
    `arguments` go to SGLang's ServerArgs as they are (the mesh file's `[rollout.engine]`)."""

    model: str
    dtype: str = "float32"
    tensor_parallel: int = 1
    version: PolicyVersion = PolicyVersion()
    arguments: dict[str, Any] = {}
    cpu: bool = True
    role: EngineRole = "whole"


class Begun(msgspec.Struct, array_like=True):
    """A completion as far as it has got. The versions' spans cover the tokens."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]


class Progress(msgspec.Struct, array_like=True):
    """What a request that still runs has got since it was last spoken of: `more` goes on from its `start`-th token."""

    id: str
    start: int
    more: Begun


class Pair(msgspec.Struct, array_like=True):
    """What the two engines of a sample must agree on: where the one that prefills is met (`port`, on loopback), under which
    number (`room`, never used twice), and the `version` that both serve."""

    port: int
    room: int
    version: PolicyVersion


class EngineRequest(msgspec.Struct, array_like=True):
    """One completion to sample, or a sequence to score. `name` says whose it is in error messages."""

    id: str
    token_ids: list[int]
    sampling: Sampling
    name: str = ""
    score: int | None = None
    """None: sample. Else nothing is sampled: the reply's log-probs are those of `token_ids` themselves, at temperature
    1 and with the first one's 0, and of this many likeliest words for each."""
    begun: Begun | None = None
    """What another engine has sampled of it; the reply is of the whole."""
    pair: Pair | None = None
    """For engines that prefill or decode only. Both get the same request; the one that prefills answers, without tokens,
    when its KV has been moved."""


class EngineReply(msgspec.Struct, array_like=True, kw_only=True):
    """What became of one request. With `error` set, `blame` tells what failed: the request itself (it fits no engine
    like this one), its sampling, the engine (another one may do better, and go on from the tokens that are here), or the
    pair: its KV did not get from one engine to the other."""

    id: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: FinishReason = "stop"
    versions: list[VersionSpan] = []
    text: str = ""
    cached_tokens: int = 0
    cached_memory: int = 0
    cached_files: int = 0
    """Of `cached_tokens`, those from the tier below: from host memory, and from files."""
    error: str | None = None
    blame: Blame = "sampling"
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    """Of a scored sequence: the likeliest words for each token after the first, best first."""


class EngineStats(msgspec.Struct, kw_only=True):
    """`busy_s` is the wall time with at least one request running, `tokens` counts sampled tokens; both since start.
    Of `prompt_tokens`, those of finished requests, `cached_tokens` were not computed. `pool_tokens` is what its KV has room
    for; `files` what `pages.COUNTS` names, where it has a tier of files; `moved` what it sent away of KV as an engine that
    prefills (`sglang_pairs.COUNTS`), and `port` where it is met. `idle_at` is when the last request ended (Unix time).
    `pids` are the engine's own processes by name."""

    version: PolicyVersion
    state: EngineState
    cause: str = ""
    running: int = 0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_memory: int = 0
    cached_files: int = 0
    files: dict[str, int] = {}
    moved: dict[str, int] = {}
    port: int = 0
    busy_s: float = 0.0
    idle_at: float = 0.0
    start_s: float = 0.0
    context_length: int = 0
    pool_tokens: int = 0
    pids: dict[str, int] = {}


class Collected(msgspec.Struct):
    """The replies that finished since the last call, how the engine is, and how far the others are."""

    replies: list[EngineReply]
    stats: EngineStats
    progress: list[Progress] = []


class CommitReport(msgspec.Struct, kw_only=True):
    """What a commit did. `ok` false with state "serving": the version before is served still, whole.
    `version` is what the engine serves now; `seconds` is the whole operation, `parts` its parts in milliseconds."""

    ok: bool
    state: EngineState
    version: PolicyVersion
    message: str = ""
    retracted: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = {}


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(list[EngineRequest])
_collected = msgspec.msgpack.Decoder(Collected)
_report = msgspec.msgpack.Decoder(CommitReport)
_stats = msgspec.msgpack.Decoder(EngineStats)

encode = _encoder.encode
decode_requests = _requests.decode
decode_collected = _collected.decode
decode_report = _report.decode
decode_stats = _stats.decode
