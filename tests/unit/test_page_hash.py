"""The names of pages, where SGLang's own hash can not be compiled."""

from __future__ import annotations

import hashlib
import shutil
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.cpp_utils import native_hash

from milkweed.rollout.sglang_tier import PythonHash, ready_hash

SALT = hashlib.sha256(b"0.3").digest()


@pytest.mark.skipif(shutil.which("ninja") is None or shutil.which("c++") is None, reason="SGLang's hash needs ninja and a C++ compiler")
@pytest.mark.parametrize("prior", [None, SALT])
@pytest.mark.parametrize("length", [0, 1, 16, 17, 300])
@pytest.mark.parametrize("page", [None, 16])
def test_python_names_pages_as_sglang_does(monkeypatch: pytest.MonkeyPatch, prior: bytes | None, length: int, page: int | None) -> None:
    ids = array("q", [(7919 * i) % 150_000 for i in range(length)])
    theirs = native_hash.get_native_hash(ids, prior, page)
    monkeypatch.setattr(native_hash, "_load_native_hash_module", PythonHash)
    assert native_hash.get_native_hash(ids, prior, page) == theirs


def test_a_token_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        PythonHash.get_hash(array("q", [1 << 32]), 1, 1, False, None, 16)


def test_without_a_compiler_the_tier_works_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Any:
        try:
            raise OSError("Ninja is required to load C++ extensions")
        except OSError as e:
            raise RuntimeError("Failed to load HiCache native hash extension") from e

    monkeypatch.setattr(native_hash, "_load_native_hash_module", load)
    ready_hash()
    assert "Ninja is required" in caplog.text
    assert native_hash.get_native_hash([1, 2, 3], None) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])).hexdigest()
