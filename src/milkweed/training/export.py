"""A Hugging Face folder written whole or not at all: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from milkweed.errors import DataError

SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_SKIP = {"config.json", "model.safetensors.index.json"}


def copy_side_files(source: Path, target: Path, dtype: str, *, value_head: bool = False) -> None:
    """Tokenizer, chat template and generation config as they are; config.json with the dtype that was written and, for
    a model with a value head, as transformers' models for sequence classification with one label have it."""
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.name not in _SKIP and file.is_file():
                shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if value_head:
        names = config.get("architectures") or [""]
        config["architectures"] = [n.replace("ForCausalLM", "ForSequenceClassification") for n in names]
        config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_weights(tensors: Iterable[tuple[str, Any]], target: Path, *, max_bytes: int = 4 << 30) -> int:
    """Write tensors as one safetensors file, or as numbered ones with an index where they pass `max_bytes`. Returns the
    number of bytes."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, Any] = {}
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        save_file(held, target / f"part-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > max_bytes:
            flush()
        held[name] = tensor
        size += nbytes
        total += nbytes
    flush()
    if len(files) == 1:
        (target / "part-0.safetensors").rename(target / "model.safetensors")
        return total
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):
        (target / f"part-{i}.safetensors").rename(target / name)
    where = {key: names[i] for i, keys in enumerate(files) for key in keys}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


class Partial:
    """A folder under construction beside its place: `commit` puts it there, leaving the block otherwise removes it."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place).absolute()
        self.path = self.place.with_name(f".{self.place.name}.partial-{os.getpid()}")

    def __enter__(self) -> Partial:
        if self.place.exists() and not self.place.is_dir():
            raise DataError(f"{self.place}: exists and is no folder; export somewhere else")
        if self.place.is_dir() and any(self.place.iterdir()) and not (self.place / "config.json").exists():
            raise DataError(f"{self.place}: holds files that are no exported model; export somewhere else")
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return self

    def commit(self) -> None:
        old = self.place.with_name(f".{self.place.name}.old-{os.getpid()}")
        if self.place.exists():
            self.place.rename(old)
        self.path.rename(self.place)
        shutil.rmtree(old, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
