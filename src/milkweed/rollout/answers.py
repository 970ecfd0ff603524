"""SGLang's answers as replies, checked; and what one has got so far of a completion that another may have to finish."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from milkweed.rollout.protocol import Begun, EngineReply, EngineRequest, Progress
from milkweed.types import PolicyVersion, Sampling, VersionSpan

if TYPE_CHECKING:
    from milkweed.rollout.sglang_engine import SGLang

NOTHING = Begun([], [], [])


def refusal(r: EngineRequest, engine: SGLang | None) -> str | None:
    """Why no engine like this one can serve the request, if so."""
    who = f"sample {r.name or r.id}"
    if not r.token_ids:
        return f"{who}: the prompt is empty"
    if engine is None:
        return None
    if len(r.token_ids) > engine.longest_prompt:
        return (
            f"{who}: its prompt has {len(r.token_ids)} tokens, the engine takes at most {engine.longest_prompt} "
            f"(context of {engine.context_length}): shorten it, or raise context_length or max_total_tokens in "
            "[rollout.engine]"
        )
    if r.sampling.seed is not None and not engine.deterministic:
        return f"{who}: sampling.seed needs enable_deterministic_inference = true in [rollout.engine]"
    return None


def carries(sampling: Sampling) -> bool:
    """Whether another engine can go on with a completion. Not one with a seed, which promises the same tokens to the bit
    (prefill and decoding differ in the last ones), nor one with stop strings, which may have begun already."""
    return sampling.seed is None and not sampling.stop


def remaining(sampling: Sampling, begun: Begun | None) -> Sampling:
    """What is to be sampled yet."""
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(begun.token_ids)) if begun else sampling


def join(begun: Begun | None, more: Begun) -> Begun:
    """`more` after `begun`."""
    if begun is None:
        return more
    whole = Begun(list(begun.token_ids), list(begun.logprobs), list(begun.versions))
    _extend(whole, more)
    return whole


def _extend(begun: Begun, more: Begun) -> None:
    n = len(begun.token_ids)
    for s in more.versions:
        start = n + s.start
        if begun.versions and begun.versions[-1].version == s.version:
            start = begun.versions.pop().start
        begun.versions.append(VersionSpan(start, n + s.end, s.version))
    begun.token_ids += more.token_ids
    begun.logprobs += more.logprobs


def grown(begun: Begun | None, progress: Progress) -> Begun | None:
    """`begun` with what its engine has said since, changed in place: long samples are told of many times. As it was where
    something between is missing."""
    if begun is None:
        return progress.more if progress.start == 0 else None
    if progress.start == len(begun.token_ids):
        _extend(begun, progress.more)
    return begun


def since(whole: Begun, start: int) -> Begun:
    """From the `start`-th token on."""
    spans = [VersionSpan(max(s.start - start, 0), s.end - start, s.version) for s in whole.versions if s.end > start]
    return Begun(whole.token_ids[start:], whole.logprobs[start:], spans)


def usable(begun: Begun | None, sampling: Sampling) -> Begun | None:
    """`begun` where another engine can go on from there."""
    if begun is None or not carries(sampling) or not 0 < len(begun.token_ids) < sampling.max_tokens:
        return None
    return begun


def so_far(answer: dict[str, Any]) -> Begun | None:
    """What an unfinished answer holds. None where its parts do not agree yet."""
    meta = answer["meta_info"]
    ids, logprobs = list(answer["output_ids"]), [e[0] for e in meta.get("output_token_logprobs") or []]
    versions = _spans(meta)
    whole = bool(ids) and len(logprobs) == len(ids) and all(x is not None and math.isfinite(x) for x in logprobs)
    return Begun(ids, logprobs, versions) if whole and _covered(versions, len(ids)) else None


def finished(r: EngineRequest, answer: dict[str, Any]) -> EngineReply:
    """The whole completion, what was `begun` elsewhere too."""
    meta = answer["meta_info"]
    ids = list(answer["output_ids"])
    entries = meta.get("output_token_logprobs") or []
    logprobs = [float(e[0]) if e[0] is not None else math.nan for e in entries]
    versions = _spans(meta)
    reason, tiers = meta["finish_reason"] or {}, meta.get("cached_tokens_details") or {}
    kind = reason.get("type", "stop")
    who, error = f"sample {r.name or r.id}", None
    if len(logprobs) > len(ids):  # a token that a stop string or an abort cut off
        logprobs = logprobs[: len(ids)]
    if len(logprobs) != len(ids):
        error = f"{who}: SGLang returned {len(ids)} tokens and {len(logprobs)} log-probs"
    elif any(not math.isfinite(x) for x in logprobs):
        error = f"{who}: a sampled token has a log-prob that is no finite number; are the weights finite?"
    elif ids and not _covered(versions, len(ids)):
        error = f"{who}: SGLang's version spans do not cover its {len(ids)} tokens"
    elif r.pair is not None and (other := [s.version for s in versions if s.version != r.pair.version]):
        error = f"{who}: its engine went on with version {other[0]} where both had agreed on {r.pair.version}"
    whole = join(r.begun, Begun(ids, logprobs, versions))
    reply = EngineReply(
        id=r.id,
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        finish_reason="error" if error else kind if kind in ("stop", "length", "abort") else "error",
        versions=whole.versions,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        cached_memory=int(tiers.get("host") or 0),
        cached_files=int(tiers.get("storage") or 0),
        error=error if error else None if kind in ("stop", "length", "abort") else str(reason),
    )
    if isinstance(matched := reason.get("matched"), str):
        reply.text = matched  # cut off the text once it is decoded
    return reply


def scored(r: EngineRequest, answer: dict[str, Any]) -> EngineReply:
    """The log-probs of a sequence that was given."""
    meta = answer["meta_info"]
    entries = (meta.get("input_token_logprobs") or [])[1:]
    best = (meta.get("input_top_logprobs") or [])[1:] if r.score else []
    reply = EngineReply(
        id=r.id,
        logprobs=[0.0, *(float(e[0]) for e in entries)],
        top_ids=[[int(e[1]) for e in row] for row in best],
        top_logprobs=[[float(e[0]) for e in row] for row in best],
    )
    who, rest = f"sequence {r.name or r.id}", r.token_ids[1:]
    if [e[1] for e in entries] != rest or (r.score and [len(row) for row in best] != [r.score] * len(rest)):
        reply.error = f"{who}: SGLang returned log-probs of other tokens than were asked for"
    elif not all(math.isfinite(x) for x in reply.logprobs):
        reply.error = f"{who}: a token has a log-prob that is no finite number; are the weights finite?"
    return reply


def _spans(meta: dict[str, Any]) -> list[VersionSpan]:
    spans = meta.get("weight_versions") or []
    return [VersionSpan(s["start"], s["end"], PolicyVersion.parse(s["version"])) for s in spans if s["end"] > s["start"]]


def _covered(versions: list[VersionSpan], count: int) -> bool:
    return bool(versions) and versions[0].start == 0 and versions[-1].end == count
