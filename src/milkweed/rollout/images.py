"""An engine rank's parameters as one image: traced once, then filled from a staged version by plain copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from milkweed.errors import TransferError
from milkweed.transfer.copying import Job
from milkweed.transfer.manifest import Staged
from milkweed.transfer.plan import EngineLayout, Parameter
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
        if staged.nbytes != self.sent_as(staged.dtype).nbytes:
            raise TransferError(f"version {staged.version} has {staged.nbytes} bytes, not {self.sent_as(staged.dtype).nbytes}")
        image.check()
        return image

    def filling(self, image: StagedImage, ranges: Sequence[tuple[int, int]] | None = None) -> Filling:
        """What fills the parameters from a mapped version, or only those parts of them that lie in `ranges`."""
        return Filling(self, image, ranges)

    def sent_as(self, dtype: str) -> EngineLayout:
        if dtype not in self._sent:
            self._sent[dtype] = self.layout.as_dtype(dtype)
        return self._sent[dtype]


class Filling:
    """A version on its way into the parameters."""

    def __init__(self, live: ParameterImage, image: StagedImage, ranges: Sequence[tuple[int, int]] | None) -> None:
        self._live, self._image, self._ranges = live, image, ranges

    def parts(self) -> Iterator[list[Job]]:
        """What is to be copied for each parameter that has something new. Raises TransferError if the version was
        overwritten since it was staged."""
        live, ranges = self._live, self._ranges
        layout = live.sent_as(self._image.staged.dtype)
        start, i = layout.starts[live.rank], 0
        self._image.check()
        for sent in layout.ranks[live.rank].parameters:
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
                yield self._jobs(sent, low, parts)

    def check(self) -> None:
        """Raises TransferError if the version was overwritten while it was copied."""
        self._image.check()

    def _jobs(self, sent: Parameter, low: int, parts: list[tuple[int, int]]) -> list[Job]:
        import torch

        live = self._live.parameters[sent.name].data
        if live.device.type == "cpu" and live.dtype == getattr(torch, sent.dtype):
            return [(live.data_ptr() + a - low, self._image.address + a, b - a) for a, b in parts]
        # the image has the parameter's elements as they lie in its memory, whatever order its dimensions have there
        flat = live.as_strided((live.numel(),), (1,), live.storage_offset())
        return [lambda: flat.copy_(self._image.tensor(sent.dtype, (live.numel(),), low))]
