"""What the ledger writes down and gives back, and how a trajectory becomes bytes."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec

from milkweed.types import Trajectory


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt given out to be sampled `samples` times. `number` counts the run's groups from 1, over all its lives;
    `position` is the place in the stream `stream` ("": a list given by hand, which a resumed run cannot find again)."""

    number: int
    group: str
    stream: str
    position: int
    epoch: int
    seed: int
    prompt_id: str
    samples: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a life trains as `role`: the folder it begins from, its head, its TrainerConfig as JSON, the mesh file, and
    the packages that trained it as JSON."""

    role: str
    folder: str
    head: str
    config: str
    mesh: str
    stack: str


class HeldGroup(msgspec.Struct, kw_only=True):
    """A group that is neither trained nor dropped: what is finished of it, by sample index, and what is not.

    `turns` are the completions of unfinished samples so far, in the order they were asked for.
    """

    issue: Issue
    finished: dict[int, Trajectory]
    unfinished: list[int]
    turns: dict[int, list[bytes]] = {}


class Resumed(msgspec.Struct, kw_only=True):
    """What a run that goes back to a checkpoint finds: the groups it holds (oldest first), the groups that steps after
    the checkpoint had trained (to be trained again, in this order), where each stream goes on, and how many bytes were
    cut from torn segments. `lives` and `steps` are what a Lineage is made of."""

    held: list[HeldGroup]
    again: dict[int, list[int]]
    streams: dict[str, int]
    next_number: int
    lives: list[tuple[int, int, int]]
    steps: list[tuple[int, int, str]]
    cut: int = 0


_encode = msgspec.msgpack.Encoder().encode
_FIELDS = Trajectory.__struct_fields__
assert _FIELDS[:3] == ("token_ids", "loss_mask", "logprobs") and _FIELDS[-1] == "segments"


def pack_trajectory(t: Trajectory) -> bytes:
    """`t` as bytes: its fields in order, int32 tokens, one byte a mask entry, fp32 log-probs (what the trainer is given),
    the rest msgpack."""
    return _encode(_flat(t))


def _flat(t: Trajectory) -> tuple[Any, ...]:
    tokens, mask, logprobs, *rest, segments = msgspec.structs.astuple(t)
    n = len(tokens)
    flat = [_flat(s) for s in segments] if segments else segments
    # struct.pack takes half the time that the module array does
    return struct.pack(f"={n}i", *tokens), bytes(mask), struct.pack(f"={n}f", *logprobs), *rest, flat


def unpack_trajectory(data: bytes) -> Trajectory:
    """Inverse of `pack_trajectory`; log-probs come back rounded to fp32."""
    return msgspec.convert(_full(msgspec.msgpack.decode(data)), Trajectory)


def _full(values: list[Any]) -> dict[str, Any]:
    d = dict(zip(_FIELDS, values, strict=True))
    tokens, logprobs = array("i"), array("f")
    tokens.frombytes(d["token_ids"])
    logprobs.frombytes(d["logprobs"])
    mask = [bool(b) for b in d["loss_mask"]]
    return d | {"token_ids": tokens.tolist(), "logprobs": logprobs.tolist(), "loss_mask": mask, "segments": [_full(s) for s in d["segments"]]}
