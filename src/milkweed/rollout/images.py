"""An engine rank's parameters as one image: traced once, then filled from a staged version by plain copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Staged
from milkweed.transfer.plan import EngineLayout
from milkweed.transfer.staging import StagedImage

if TYPE_CHECKING:
    import torch


class ParameterImage:
    """The parameters of rank `rank` of an engine with `layout`; `parameters` are the live ones, by name."""

    def __init__(self, layout: EngineLayout, rank: int, parameters: dict[str, torch.Tensor]) -> None:
        self.layout, self.rank, self.parameters, self.digest = layout, rank, parameters, layout.digest()
        self._sent = {"": layout}

    def check(self, staged: Staged, model: Any) -> StagedImage:
        """Map `staged`. Raises TransferError unless it is laid out for this engine and the model still has the
        parameters that were traced."""
        if staged.layout != self.digest:
            raise TransferError(f"version {staged.version} is laid out for another engine ({staged.layout})")
        now = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in self.parameters.items():
            if now.get(name) is not parameter:
                raise TransferError(f"the engine's parameter {name} is another than when it was traced")
        image = StagedImage(staged)
        if staged.nbytes != self._of(staged.dtype).nbytes:
            raise TransferError(f"version {staged.version} has {staged.nbytes} bytes, not {self._of(staged.dtype).nbytes}")
        image.check()
        return image

    def copies(
        self, image: StagedImage, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """One copy for each parameter, or only for what lies in `ranges` of the layout. Raises TransferError at the end
        if the version was overwritten meanwhile."""
        layout = self._of(image.staged.dtype)
        start, i = layout.starts[self.rank], 0
        image.check()
        for sent in layout.ranks[self.rank].parameters:
            low, high = start + sent.offset, start + sent.offset + sent.nbytes
            parts = [(low, high)]
            if ranges is not None:
                while i < len(ranges) and ranges[i][0] + ranges[i][1] <= low:
                    i += 1
                parts, k = [], i
                while k < len(ranges) and ranges[k][0] < high:
                    parts.append((max(low, ranges[k][0]), min(high, ranges[k][0] + ranges[k][1])))
                    k += 1
            if parts:
                yield sent.name, self._copy(image, sent, low, parts)
        image.check()

    def _copy(self, image: StagedImage, sent: Any, low: int, parts: list[tuple[int, int]]) -> Callable[[], Any]:
        import torch

        live = self.parameters[sent.name].data
        if live.device.type == "cpu" and live.dtype == getattr(torch, sent.dtype):
            to = live.data_ptr()

            def copy() -> None:
                for a, b in parts:
                    ctypes.memmove(to + a - low, image.address + a, b - a)

            return copy
        # the image has the parameter's elements as they lie in its memory, whatever order its dimensions have there
        flat = live.as_strided((live.numel(),), (1,), live.storage_offset())
        return lambda: flat.copy_(image.tensor(sent.dtype, (live.numel(),), low))

    def _of(self, dtype: str) -> EngineLayout:
        if dtype not in self._sent:
            self._sent[dtype] = self.layout.as_dtype(dtype)
        return self._sent[dtype]
