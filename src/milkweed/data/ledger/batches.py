"""A batch as bytes: exactly what the trainer was given, each tensor in the shortest of a few plain forms.

Positions, segments, weights and advantages are runs of one value or of one step, so what is left is 4 bytes or less for
a token and 4 for a log-prob.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from milkweed.types import Batch

if TYPE_CHECKING:
    import torch


def pack_batch(tensors: dict[str, torch.Tensor], totals: dict[str, float], temperature: float) -> bytes:
    """`Batch.tensors()` with the two other things that a batch has."""
    packed = {name: _pack(t.detach().cpu().contiguous()) for name, t in tensors.items()}
    return msgspec.msgpack.encode({"tensors": packed, "totals": totals, "temperature": temperature})


def unpack_batch(data: bytes) -> Batch:
    """Inverse of `pack_batch`, to the bit."""
    d = msgspec.msgpack.decode(data)
    tensors = {name: _unpack(entry) for name, entry in d["tensors"].items()}
    own = ("tokens", "positions", "segments", "mask", "weights", "logprobs", "advantages")
    fields: dict[str, Any] = {name: tensors.pop(name) for name in own}
    return Batch(**fields, extra=tensors, totals=d["totals"], temperature=d["temperature"])


def _pack(tensor: torch.Tensor) -> list[Any]:
    """[kind of the tensor, its shape, form, the parts of that form]."""
    import torch

    kind = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    flat = bits.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[tensor.element_size()])
    forms = [("runs", _runs(flat))]
    if kind == "bool":
        forms.append(("bits", [np.packbits(flat).tobytes()]))
    elif kind == "int64":
        forms.append(("steps", _runs(np.diff(flat, prepend=0))))
        if flat.size and -(2**31) <= flat.min() and flat.max() < 2**31:
            narrow = np.uint16 if 0 <= flat.min() and flat.max() < 2**16 else np.int32
            forms.append((narrow.__name__, [flat.astype(narrow).tobytes()]))
    forms.append(("raw", [flat.tobytes()]))
    form, parts = min(forms, key=lambda f: sum(map(len, f[1])))
    return [kind, list(tensor.shape), form, parts]


def _runs(flat: np.ndarray) -> list[bytes]:
    """The values that runs have, and where they begin (int32)."""
    begins = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]])) if flat.size else np.zeros(0, np.int64)
    return [flat[begins].tobytes(), begins.astype(np.int32).tobytes()]


def _unpack(entry: list[Any]) -> torch.Tensor:
    import torch

    kind, shape, form, parts = entry
    dtype = getattr(torch, kind)
    word = np.dtype({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize])
    size = int(np.prod(shape))
    if form in ("runs", "steps"):
        values, begins = np.frombuffer(parts[0], word), np.frombuffer(parts[1], np.int32)
        flat = np.repeat(values, np.diff(begins, append=size)) if size else np.zeros(0, word)
        if form == "steps":
            flat = np.cumsum(flat, dtype=word)
    elif form == "bits":
        flat = np.unpackbits(np.frombuffer(parts[0], np.uint8), count=size)
    elif form in ("uint16", "int32"):
        flat = np.frombuffer(parts[0], np.dtype(form)).astype(word)
    else:
        flat = np.frombuffer(parts[0], word)
    return torch.from_numpy(np.array(flat, word).view(np.uint8)).view(dtype).reshape(shape)
