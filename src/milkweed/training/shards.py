"""Which slices of which Hugging Face tensors a trainer rank holds and publishes: computed once, cheap every step.

With q, k and v kept apart and rotate-half rotary embeddings (see `titan`) a rank's part of a parameter is a plain slice
of its Hugging Face tensor; a mixture's experts, stored as one tensor, are one slice an expert. Where ranks hold copies
of the same slice, one of them publishes it, chosen in turn so that the work spreads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """A slice of the Hugging Face tensor `name`: `[o, o + n)` in every dimension for `o` of `offsets` and `n` of the
    local shape. `expert` picks the row of a stacked parameter's local part, None for plain ones."""

    name: str
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    expert: int | None

    def tensor(self) -> torch.Tensor:
        """The rank's live values, contiguous, detached."""
        local = local_part(self.parameter)
        return (local if self.expert is None else local[self.expert]).contiguous()


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter (all of it where it is not cut)."""
    local = getattr(parameter, "_local_tensor", parameter)
    return local.detach()


def hf_template(from_hf: dict[str, str | None], titan_name: str) -> tuple[str, str]:
    """The Hugging Face name of TorchTitan's `titan_name` and its layer; experts keep one `{}` for their number.

    Raises KeyError where the adapter has no name for it.
    """
    layer = re.search(r"\d+", titan_name)
    abstract = titan_name if layer is None else titan_name[: layer.start()] + "{}" + titan_name[layer.end() :]
    for hf, titan in from_hf.items():
        if titan == abstract:
            number = layer.group(0) if layer else ""
            return hf.replace("{}", number, 1), number
    raise KeyError(titan_name)


def plan(parameters: dict[str, torch.nn.Parameter], from_hf: dict[str, str | None]) -> list[Piece]:
    """This rank's pieces, each slice of the model being in exactly one rank's plan. `parameters` by TorchTitan name, a
    tied head absent; the same order on every rank."""
    out = []
    for index, (titan_name, parameter) in enumerate(parameters.items()):
        name, _ = hf_template(from_hf, titan_name)
        shape, offsets, publishes = _place(parameter, index)
        local_shape = local_part(parameter).shape
        if not publishes or 0 in local_shape:
            continue
        if "{}" not in name:
            out.append(Piece(name, parameter, shape, offsets, None))
            continue
        for i in range(local_shape[0]):
            out.append(Piece(name.format(offsets[0] + i), parameter, shape[1:], offsets[1:], i))
    return out


def _place(parameter: torch.Tensor, index: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """(global shape, this rank's offsets, whether this rank publishes it)."""
    shape = tuple(parameter.shape)
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return shape, (0,) * len(shape), rank == 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    if tuple(local_shape) != tuple(local_part(parameter).shape):
        raise RuntimeError(f"a parameter of shape {shape} holds {tuple(local_part(parameter).shape)}, not {local_shape}")
    coordinate = mesh.get_coordinate()
    publishes = all(
        coordinate[d] == index % mesh.size(d) for d, placement in enumerate(parameter.placements) if placement.is_replicate()
    )
    return shape, tuple(offsets), publishes


def full_tensors(
    parameters: dict[str, torch.nn.Parameter], from_hf: dict[str, str | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor whole, one parameter in memory at a time. All ranks must iterate together."""
    for titan_name, parameter in parameters.items():
        name, _ = hf_template(from_hf, titan_name)
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if "{}" not in name:
            yield name, whole
        else:
            for i in range(whole.shape[0]):
                yield name.format(i), whole[i]
