"""What staged weights must be before an engine is stopped to load them: the names and shapes of its model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from milkweed.errors import DataError, TransferError
from milkweed.transfer.manifest import Staged

LM_HEAD = "lm_head.weight"


def folder_tensors(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a Hugging Face folder, read from the safetensors headers alone. With tied embeddings
    the head is left out, as folders differ on whether it is written. Raises DataError without safetensors."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no *.safetensors file, so there are no weights to sample from")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as f:
                header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        except (ValueError, OverflowError, MemoryError) as e:
            raise DataError(f"{file}: not a safetensors file ({e})") from e
        for name, entry in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    if tied(folder):
        shapes.pop(LM_HEAD, None)
    return shapes


def tied(folder: str | os.PathLike[str]) -> bool:
    """Whether the model's head is its embedding."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{folder}/config.json: {e}") from e
    return bool(config.get("tie_word_embeddings", False))


def check_staged(staged: Staged, expected: dict[str, tuple[int, ...]], *, is_tied: bool) -> None:
    """Raises TransferError, naming the tensors, unless `staged` holds exactly the model's tensors, each whole, inside
    the file and of a floating dtype."""
    have = {t.name: t for t in staged.tensors}
    if len(have) != len(staged.tensors):
        raise TransferError(f"version {staged.version}: a tensor is staged twice")
    missing = sorted(expected.keys() - have.keys())
    extra = sorted(have.keys() - expected.keys() - ({LM_HEAD} if is_tied else set()))
    if missing or extra:
        raise TransferError(
            f"version {staged.version} does not fit the engine's model: missing {_few(missing)}, unknown {_few(extra)}"
        )
    for name, shape in expected.items():
        t = have[name]
        size = _SIZES.get(t.dtype.removeprefix("torch."))
        if size is None:
            raise TransferError(f"version {staged.version}: {name} has dtype {t.dtype}, which an engine cannot load")
        if tuple(t.shape) != shape:
            raise TransferError(
                f"version {staged.version}: {name} has shape {list(t.shape)}, the engine's is {list(shape)}"
            )
        count = 1
        for n in shape:
            count *= n
        if t.nbytes != count * size or t.offset < 0 or t.offset + t.nbytes > staged.nbytes:
            raise TransferError(f"version {staged.version}: {name} does not lie whole in its slot")
    _check_file(staged)


def check_image(staged: Staged, layout: str) -> None:
    """Raises TransferError unless `staged` is laid out for an engine whose layout has this digest and lies in its file."""
    if staged.layout != layout:
        what = f"is laid out for engines {layout}" if layout else "was never asked for its layout"
        raise TransferError(f"version {staged.version} is laid out for engines {staged.layout}; this one {what}")
    _check_file(staged)


def verify(staged: Staged) -> None:
    """Reads it all. Raises TransferError where it is not what its digest says."""
    from milkweed.transfer.staging import open_staged

    open_staged(staged).verify()


def _check_file(staged: Staged) -> None:
    try:
        length = os.stat(staged.path).st_size
    except OSError as e:
        raise TransferError(f"version {staged.version}: {staged.path}: {e.strerror}") from e
    if staged.offset + staged.nbytes > length:
        raise TransferError(f"version {staged.version}: {staged.path} ends before the slot does")


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
