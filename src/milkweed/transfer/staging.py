"""The engine's side: a staged version as named tensors, views of the shared memory."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Staged
from milkweed.transfer.slots import HEADER

if TYPE_CHECKING:
    import torch

_KEPT = 2  # maps of the newest files: mapping costs a page fault for each page, and a file serves many versions
_maps: dict[str, mmap.mmap] = {}
_images: dict[str, np.ndarray] = {}
_lock = threading.Lock()


class StagedWeights:
    """A mapped version. The views are valid as long as this process holds the version (`Puller.hold`); a write to them
    stays in this process."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self._memory = _map(staged.path)
        if staged.offset < 0 or staged.offset + staged.nbytes > len(self._memory):
            raise TransferError(
                f"staged version {staged.version} reaches outside {staged.path} ({len(self._memory)} bytes)"
            )
        for tensor in staged.tensors:
            if tensor.offset < 0 or tensor.offset + tensor.nbytes > staged.nbytes:
                raise TransferError(f"tensor {tensor.name} reaches outside the slot of staged version {staged.version}")

    def verify(self) -> None:
        """Raises TransferError unless the slot still holds exactly what was staged. Costs one pass over its bytes
        (about 0.1 s a GB)."""
        start, end = self.staged.offset, self.staged.offset + self.staged.nbytes
        with memoryview(self._memory) as whole, whole[start:end] as slot:
            found = xxhash.xxh3_64_intdigest(slot)
        if found != self.staged.digest:
            raise TransferError(
                f"staged version {self.staged.version} in {self.staged.path} does not have its digest: the slot was "
                "overwritten; an engine must hold a version while it commits it"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Full tensors by Hugging Face name, views without a copy."""
        import torch

        views = {}
        for tensor in self.staged.tensors:
            dtype = getattr(torch, tensor.dtype)
            if tensor.nbytes == 0:
                views[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
                continue
            count, start = tensor.nbytes // dtype.itemsize, self.staged.offset + tensor.offset
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
            views[tensor.name] = flat.view(tensor.shape)
        return views


class StagedImage:
    """A mapped version that is laid out as an engine's parameters lie in memory. Pages are mapped at once, so that a
    copy meets no page faults; the mapping cannot be written to."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self._memory = _map_image(staged.path)
        if staged.offset < HEADER or staged.offset + staged.nbytes > len(self._memory):
            raise TransferError(f"staged version {staged.version} reaches outside {staged.path}")
        self.address = self._memory.ctypes.data + staged.offset

    def check(self) -> None:
        """Raises TransferError if the slot was given to be filled again since the version was staged."""
        header = self._memory[self.staged.offset - HEADER : self.staged.offset]
        if int(header.view(np.uint64)[0]) != self.staged.stamp:
            raise TransferError(
                f"staged version {self.staged.version} in {self.staged.path} was overwritten; an engine must hold a "
                "version while it commits it"
            )

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Part of the version as a tensor, without a copy; not to be written to."""
        import ctypes
        import math

        import torch

        kind = getattr(torch, dtype)
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=kind)
        raw = (ctypes.c_char * (count * kind.itemsize)).from_address(self.address + offset)
        return torch.frombuffer(raw, dtype=kind, count=count).view(shape)


def open_staged(staged: Staged) -> StagedWeights:
    """Map a staged version. Raises TransferError if its file is gone or too small."""
    return StagedWeights(staged)


def _map_image(path: str) -> np.ndarray:
    with _lock:
        memory = _images.pop(path, None)
        if memory is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise TransferError(f"staged weights {path} cannot be opened: {error}; was their puller closed?") from error
            try:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                memory = np.frombuffer(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ), np.uint8)
            except (OSError, ValueError) as error:
                raise TransferError(f"staged weights {path} cannot be mapped: {error}") from error
            finally:
                os.close(descriptor)
        _images[path] = memory
        while len(_images) > _KEPT:
            _images.pop(next(iter(_images)))
        return memory


def _map(path: str) -> mmap.mmap:
    with _lock:
        memory = _maps.pop(path, None)
        if memory is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise TransferError(
                    f"staged weights {path} cannot be opened: {error}; was their puller closed?"
                ) from error
            try:
                # copy on write: torch wants writable memory, and an engine must not be able to alter another's weights
                memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise TransferError(f"staged weights {path} cannot be mapped: {error}") from error
            finally:
                os.close(descriptor)
        _maps[path] = memory
        while len(_maps) > _KEPT:
            _maps.pop(next(iter(_maps)))  # unmapped once the last view of it is gone
        return memory
