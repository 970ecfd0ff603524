"""What travels between those who score and the pools that do the work."""

from __future__ import annotations

import msgspec


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One call of a reward function. `payload` is the pickled (args, kwargs)."""

    id: int
    function: str
    payload: bytes
    deadline_s: float


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of an item: a reward, or `error` (words that follow "reward") and where it happened."""

    id: int
    reward: float | None = None
    parts: dict[str, float] = {}
    error: str | None = None
    trace: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_items = msgspec.msgpack.Decoder(list[Item]).decode
decode_outcomes = msgspec.msgpack.Decoder(tuple[list[Outcome], dict[str, float]]).decode
