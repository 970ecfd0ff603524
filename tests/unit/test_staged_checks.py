"""Staged weights that do not fit an engine are refused before it is stopped, and the refusal names the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from milkweed.errors import DataError, TransferError
from milkweed.rollout.checks import check_staged, folder_tensors
from milkweed.transfer.manifest import Staged, StagedTensor
from milkweed.types import PolicyVersion

SHAPES = {"model.a.weight": (4, 2), "model.b.weight": (3,)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in (SHAPES | {"lm_head.weight": (4, 2)}).items():
        size = 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    return tmp_path


def staged(path: Path, **changes: object) -> Staged:
    file = path / "slot"
    file.write_bytes(bytes(64))
    tensors = [
        StagedTensor("model.a.weight", "float32", (4, 2), 0, 32),
        StagedTensor("model.b.weight", "float32", (3,), 32, 12),
    ]
    whole = Staged(PolicyVersion(0, 3), str(file), 0, 44, 0, tensors)
    return msgspec.structs.replace(whole, **changes)


def test_a_folder_tells_its_tensors_without_the_head_that_is_tied(folder: Path) -> None:
    assert folder_tensors(folder) == SHAPES


def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        folder_tensors(tmp_path)


def test_whole_weights_pass_with_and_without_a_tied_head(tmp_path: Path) -> None:
    good = staged(tmp_path)
    check_staged(good, SHAPES, is_tied=False)
    head = StagedTensor("lm_head.weight", "float32", (4, 2), 0, 32)
    check_staged(msgspec.structs.replace(good, tensors=[*good.tensors, head]), SHAPES, is_tied=True)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("model.a.weight", "float32", (4, 2), 0, 32)], "missing model.b.weight"),
        ([*"ab", ("lm_head.weight", "float32", (4, 2), 0, 32)], "unknown lm_head.weight"),
        (["a", ("model.b.weight", "float32", (4,), 32, 16)], "model.b.weight has shape"),
        (["a", ("model.b.weight", "int8", (3,), 32, 3)], "dtype int8"),
        (["a", ("model.b.weight", "float32", (3,), 40, 12)], "model.b.weight does not lie whole"),
        (["a", "b", "b"], "twice"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: list, words: str) -> None:
    good = staged(tmp_path)
    by = {"a": good.tensors[0], "b": good.tensors[1]}
    made = [by[t] if isinstance(t, str) else StagedTensor(*t) for t in tensors]
    with pytest.raises(TransferError, match=words):
        check_staged(msgspec.structs.replace(good, tensors=made), SHAPES, is_tied=False)


def test_a_file_that_is_gone_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="ends before"):
        check_staged(staged(tmp_path, offset=60), SHAPES, is_tied=False)
    with pytest.raises(TransferError, match="No such file"):
        check_staged(msgspec.structs.replace(staged(tmp_path), path=str(tmp_path / "gone")), SHAPES, is_tied=False)
