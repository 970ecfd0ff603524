"""The shared tier of KV inside SGLang's schedulers: `Pages` as a storage of its hierarchical cache. Read from SGLang 0.5.23."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from milkweed.rollout.pages import Counts, Pages
from milkweed.types import PolicyVersion


class Tier(HiCacheStorage):
    """SGLang's view of `Pages`; made by its factory for dynamic backends. One for each rank of an engine."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        ready_hash()
        c = storage_config.extra_config
        self.pages: Pages | None = None
        self._config, self._storage = c, storage_config
        # the engine's process is the parent of its schedulers
        self._counts = Counts(f"{c['counts']}{os.getppid()}-{storage_config.tp_rank}", create=True)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool says what a page is; pages of another kind lie in another folder."""
        super().register_mem_pool_host(mem_pool_host)
        c, s = self._config, self._storage
        page = mem_pool_host.get_dummy_flat_data_page()
        kind = [c["model"], s.tp_rank, s.tp_size, mem_pool_host.layout, mem_pool_host.page_size, str(page.dtype), page.numel()]
        name = hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:16]
        logger = logging.getLogger(__name__)
        self.pages = Pages(Path(c["folder"]) / name, int(c["bytes"]) // s.tp_size, self._counts, logger.error)
        self.pages.serve(PolicyVersion.parse(c["version"]))

    @property
    def _pages(self) -> Pages:
        assert self.pages is not None, "SGLang used the storage before it registered its host pool"
        return self.pages

    def exists(self, key: str) -> bool:
        return self._pages.has(key)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return target_location if self._pages.read(key, _bytes(target_location)) else None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for key, target in zip(keys, target_locations, strict=True):
            found.append(self.get(key, target))
            if found[-1] is None:  # pages after a missing one are of no use
                break
        return found + [None] * (len(keys) - len(found))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._pages.write(key, _bytes(value.contiguous()))

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))


def ready_hash() -> None:
    """SGLang compiles the hash that names its pages when it looks for the first one, in the thread that looks: for seconds no
    page is found, and without ninja, a C++ compiler and libcrypto's headers none ever is. So it is made before the engine
    serves; where it can not be, Python makes the same names, a few times slower."""
    try:
        native_hash._load_native_hash_module()
    except RuntimeError as e:
        why = str(e.__cause__ or e).strip().splitlines()
        logging.getLogger(__name__).warning("pages of KV are named by Python's SHA-256: SGLang's could not be built: %s", why[:1])
        native_hash._load_native_hash_module = PythonHash


class PythonHash:
    """SHA-256 over the page before (32 bytes, if any) and a page's tokens as little-endian 32-bit words."""

    @staticmethod
    def get_hash(
        raw: array[int], length: int, width: int, bigram: bool, prior: bytes | None, page_size: int | None
    ) -> str | list[str]:
        if bigram or width != 1:
            raise ValueError("pages of drafted tokens can be named only by SGLang's own hash: install ninja, a C++ compiler and libssl-dev")
        words, names = memoryview(array("I", raw[:length])), []
        for begin in range(0, length, page_size or max(length, 1)):
            prior = hashlib.sha256((prior or b"") + bytes(words[begin : begin + (page_size or length)])).digest()
            names.append(prior.hex())
        if page_size is None:
            return names[0] if names else hashlib.sha256(prior or b"").hexdigest()
        return names


def _bytes(page: torch.Tensor) -> memoryview:
    return memoryview(page.view(torch.uint8).numpy())
