"""Learns where an engine's weight loader puts what, by letting it load tensors that have no values.

The loader is run for real, with tensors on the meta device in place of the weights. Views of them keep their place in
the tensor; the copies into parameters are written down instead of done. So fused, sliced, padded and stacked parameters
need no code for each model, and a live engine can be traced without a byte of it changing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from milkweed.errors import TransferError
from milkweed.transfer.layout import aligned
from milkweed.transfer.plan import Parameter, Piece, RankLayout

UNROLLED = 4096
"""A view that jumps is cut into pieces that do not; more than this many and the loader is not understood."""

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.clone.default}  # a new tensor with the same elements
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}


@dataclass(frozen=True)
class _Copy:
    target: int
    tensor: str
    to: int
    sizes: tuple[int, ...]
    to_strides: tuple[int, ...]
    source: int
    strides: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """While it is entered, copies from `sources` into `targets` (both by storage) are recorded and not done."""

    def __init__(self, sources: dict[int, str], targets: dict[int, str]) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, int]] = {storage: (name, 0) for storage, name in sources.items()}
        self.targets = targets
        self.copies: list[_Copy] = []
        self.zeros: set[int] = set()
        self.padded: set[int] = set()
        self.kept: list[torch.Tensor] = []  # a storage's identity is its address: none may be freed while we record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = [t for t in _tensors(args) if _storage(t) in self.sources]
        if func is _aten.copy_.default and _storage(args[0]) in self.targets:
            if _storage(args[1]) in self.zeros:
                self.padded.add(_storage(args[0]))
                return args[0]  # zero already
            if not ours or ours[0] is not args[1]:
                raise TransferError(f"parameter {self.targets[_storage(args[0])]} is loaded from something computed")
            self._copy(args[0], args[1])
            return args[0]
        written = _storage(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if written in self.targets and func._schema.is_mutable:
            if func in _FILLS and (func is _aten.zero_.default or args[1] == 0):
                self.padded.add(written)
                return args[0]  # zero already
            raise TransferError(f"parameter {self.targets[written]} is changed by {func} while it is loaded")
        result = func(*args, **kwargs)
        if func in _ZEROS:
            self.zeros.add(_storage(result))
            self.kept.append(result)
        elif ours and isinstance(result, torch.Tensor) and _storage(result) not in self.sources:
            self._derive(func, ours[0], result)
        elif ours and not _is_view(func):
            raise TransferError(f"tensor {self.sources[_storage(ours[0])][0]} goes through {func} while it is loaded")
        return result

    def _derive(self, func: Any, source: torch.Tensor, result: torch.Tensor) -> None:
        """A copy of a contiguous part of a tensor stands for that part."""
        name, start = self.sources[_storage(source)]
        if func not in _COPIES or not source.is_contiguous() or not result.is_contiguous():
            raise TransferError(f"tensor {name} goes through {func} while it is loaded")
        self.sources[_storage(result)] = (name, start + source.storage_offset() - result.storage_offset())
        self.kept.append(result)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, start = self.sources[_storage(source)]
        if target.shape != source.shape:
            source = source.expand(target.shape)
        self.copies.append(
            _Copy(
                _storage(target), name, target.storage_offset(), tuple(target.shape), target.stride(),
                start + source.storage_offset(), source.stride(),
            )
        )  # fmt: skip


def trace(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    parameters: Iterable[tuple[str, torch.Tensor]],
    tensors: dict[str, tuple[int, ...]],
    *,
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
) -> tuple[RankLayout, dict[str, torch.Tensor]]:
    """The layout of the engine rank whose `parameters` `load` fills from Hugging Face tensors of these shapes, and its
    parameters by name, shared ones once.

    Nothing is changed. Raises TransferError, naming the tensor, where the loader computes with what it loads, and where
    a parameter is left without a source. `buffers` may be loaded too, and are part of the layout when they are.
    """
    sources = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in tensors.items()}
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    required = set()
    for name, parameter in parameters:
        owners.setdefault(_storage(parameter), (name, parameter))
        required.add(_storage(parameter))
    for name, buffer in buffers:
        owners.setdefault(_storage(buffer), (name, buffer))
    by_storage = {_storage(t): name for name, t in sources.items()}
    before = {storage: parameter for storage, (_, parameter) in owners.items()}
    with torch.no_grad(), _Recorder(by_storage, {s: name for s, (name, _) in owners.items()}) as recorder:
        load(iter(sources.items()))
    used = {c.target for c in recorder.copies}
    table: list[Parameter] = []
    kept: dict[str, torch.Tensor] = {}
    index: dict[int, tuple[int, int]] = {}
    offset = 0
    for storage, (name, parameter) in owners.items():
        if storage not in used:
            if storage in required and storage not in recorder.padded:  # a rank may have nothing but padding
                raise TransferError(f"the loader fills parameter {name} from none of the model's tensors")
            continue
        if _storage(parameter) != storage or before[storage] is not parameter:
            raise TransferError(f"parameter {name} was replaced while it was loaded")
        if not _dense(parameter):
            raise TransferError(f"parameter {name} does not lie in one piece of memory")
        nbytes = parameter.numel() * parameter.element_size()
        index[storage] = (len(table), parameter.storage_offset())
        table.append(Parameter(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), offset, nbytes))
        kept[name] = parameter
        offset += aligned(nbytes)
    pieces: list[Piece] = []
    for copy in recorder.copies:
        number, start = index[copy.target]
        pieces += _pieces(copy, number, start, tensors[copy.tensor])
    return RankLayout(table, _last_writer(pieces), offset), kept


def _pieces(copy: _Copy, parameter: int, start: int, shape: Sequence[int]) -> list[Piece]:
    """The copy in the coordinates of its Hugging Face tensor: boxes, each with where it goes."""
    if math.prod(copy.sizes) == 0:
        return []
    whole = _contiguous(shape)
    at, rest = [], copy.source
    for stride in whole:
        at.append(rest // stride if stride else 0)
        rest -= at[-1] * stride
    dims = [(n, s, t) for n, s, t in zip(copy.sizes, copy.strides, copy.to_strides, strict=True) if n > 1]
    found: list[Piece] = []
    _place(dims, [1] * len(shape), [0] * len(shape), at, copy.to - start, shape, whole, copy.tensor, parameter, found)
    return found


def _place(
    dims: list[tuple[int, int, int]], sizes: list[int], strides: list[int], at: list[int], to: int,
    shape: Sequence[int], whole: Sequence[int], tensor: str, parameter: int, found: list[Piece],
) -> None:  # fmt: skip
    """Give each dimension of a view (size, stride in the tensor, stride in the parameter) its dimension of the tensor;
    one that spans several is split, one that jumps or shares its dimension is unrolled."""
    if not dims:
        found.append(Piece(tensor, tuple(at), tuple(sizes), parameter, to, tuple(strides)))
        if len(found) > UNROLLED:
            raise TransferError(f"tensor {tensor} is loaded in more than {UNROLLED} pieces")
        return
    (n, stride, step), rest = dims[0], dims[1:]
    if stride == 0:
        raise TransferError(f"tensor {tensor} is loaded into several places of one copy")
    d = next(i for i, s in enumerate(whole) if s <= stride and shape[i] > 1)
    if stride == whole[d] and sizes[d] == 1 and at[d] + n <= shape[d]:
        sizes, strides = list(sizes), list(strides)
        sizes[d], strides[d] = n, step
        return _place(rest, sizes, strides, at, to, shape, whole, tensor, parameter, found)
    room = shape[d] - at[d] if stride == whole[d] else 0
    if room and sizes[d] == 1 and at[d] == 0 and n % shape[d] == 0:
        split = [(n // shape[d], stride * shape[d], step * shape[d]), (shape[d], stride, step)]
        return _place(split + rest, sizes, strides, at, to, shape, whole, tensor, parameter, found)
    for i in range(n):
        moved, left = list(at), i * stride
        for k, s in enumerate(whole):
            moved[k] += left // s
            left %= s
        if left or any(a + m > e for a, m, e in zip(moved, sizes, shape, strict=True)):
            raise TransferError(f"tensor {tensor} is loaded through a view that is not understood")
        _place(rest, list(sizes), list(strides), moved, to + i * step, shape, whole, tensor, parameter, found)
    return None


def _last_writer(pieces: list[Piece]) -> list[Piece]:
    """Where the loader writes the same place twice (a tied head after the embedding), the last one counts."""
    seen: dict[tuple, Piece] = {}
    for piece in pieces:
        key = (piece.parameter, piece.base, piece.strides, piece.sizes)
        seen.pop(key, None)
        seen[key] = piece
    return list(seen.values())


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def _dense(tensor: torch.Tensor) -> bool:
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == span


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns) or func in (
        _aten.sym_size.int, _aten.sym_numel.default, _aten.is_same_size.default,
    )  # fmt: skip


def _tensors(args: Any) -> list[torch.Tensor]:
    found = []
    for a in args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _tensors(a)
    return found
