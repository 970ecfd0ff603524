"""Which slices of which Hugging Face tensors a trainer rank holds and publishes: computed once, cheap every step.

With q, k and v kept apart and rotate-half rotary embeddings (see `titan_model`) a rank's part of a parameter is a plain slice
of its Hugging Face tensor; a mixture's experts, stored as one tensor, are one slice an expert. Where ranks hold copies
of the same slice, one of them publishes it, chosen in turn so that the work spreads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milkweed.training.model import VALUE_HEAD, weight_files
from milkweed.training.titan_model import HF_NAMES


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


def hf_template(titan_name: str) -> str:
    """The Hugging Face name of TorchTitan's `titan_name`; a stacked experts' keeps one `{}` for the expert's number.

    Raises KeyError where there is none.
    """
    layer = re.search(r"\d+", titan_name)
    if layer is None:
        return HF_NAMES[titan_name]
    return HF_NAMES[titan_name.replace(layer.group(0), "{}", 1)].replace("{}", layer.group(0), 1)


def plan(parameters: dict[str, torch.nn.Parameter], *, copies: bool = False) -> list[Piece]:
    """This rank's pieces, each slice of the model being in exactly one rank's plan; with `copies`, all that it holds.

    `parameters` by TorchTitan name, a tied head absent; the same order on every rank.
    """
    out = []
    for index, (titan_name, parameter) in enumerate(parameters.items()):
        name = hf_template(titan_name)
        shape, offsets, publishes = _place(parameter, index)
        local_shape = local_part(parameter).shape
        if not (publishes or copies) or 0 in local_shape:
            continue
        if "{}" not in name:
            out.append(Piece(name, parameter, shape, offsets, None))
            continue
        for i in range(local_shape[0]):
            out.append(Piece(name.format(offsets[0] + i), parameter, shape[1:], offsets[1:], i))
    return out


@torch.no_grad()
def load(parameters: dict[str, torch.nn.Parameter], folder: str | Path) -> None:
    """Fill this rank's part of every parameter from the folder's safetensors, reading its slices only. A value head that
    the folder does not have becomes zero.

    The folder has passed `model.check_weights`.
    """
    from safetensors import safe_open

    files = weight_files(folder)
    by_file: dict[str, list[Piece]] = {}
    for piece in plan(parameters, copies=True):
        if piece.name == VALUE_HEAD and piece.name not in files:
            local_part(piece.parameter).zero_()
            continue
        by_file.setdefault(files[piece.name].file, []).append(piece)
    for file, pieces in by_file.items():
        with safe_open(Path(folder) / file, framework="pt") as weights:
            for piece in pieces:
                target = local_part(piece.parameter)
                target = target if piece.expert is None else target[piece.expert]
                at = tuple(slice(o, o + n) for o, n in zip(piece.offsets, target.shape))
                target.copy_(weights.get_slice(piece.name)[at])


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


def full_tensors(parameters: dict[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor whole, one parameter in memory at a time. All ranks must iterate together."""
    for titan_name, parameter in parameters.items():
        name = hf_template(titan_name)
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if "{}" not in name:
            yield name, whole
        else:
            for i in range(whole.shape[0]):
                yield name.format(i), whole[i]
