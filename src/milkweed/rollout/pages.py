"""Pages of KV as files, shared by the engines of a host: what one computed the others read, also after its death.

    FOLDER/mw-TOKEN-kv/MODEL/VERSION/KEY     a header with length and checksum, then the page

The checksum is seeded with the page's name, so that a page under another key, of another model or version is as wrong as
one with a flipped byte. Whatever is wrong with a file, it is a miss: it is counted, deleted and computed anew. Files are
written beside their place and renamed into it, so that a reader sees a page whole or not at all, whoever else writes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import xxhash

from milkweed.types import PolicyVersion

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"mwkv0001"
COUNTS = ("written", "read", "written_bytes", "read_bytes", "written_us", "read_us", "bad", "full", "evicted", "discarded")
"""What is counted: pages written, read; their bytes, and the microseconds it took; pages whose file was cut short or changed; pages that could not be
written (no room on the disk); evicted for the limit's sake; write-backs that an update overtook."""
_LOOK_S = 5.0
"""An eviction looks at all files; between two such looks what others write is not known."""


class Counts:
    """Numbers that one process counts and others read: a file of as many int64 as there are `names`."""

    def __init__(self, path: str | Path, *, create: bool = False, names: tuple[str, ...] = COUNTS) -> None:
        self._names = names
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.truncate(fd, 0)
                os.truncate(fd, 8 * len(names))
            self._map = mmap.mmap(fd, 8 * len(names))
        finally:
            os.close(fd)
        self._numbers = memoryview(self._map).cast("q")
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._numbers[self._names.index(name)] += number

    def read(self) -> dict[str, int]:
        return dict(zip(self._names, self._numbers))


class Pages:
    """The pages of one model in `folder`, at most `limit` bytes of them on disk. The oldest used go first.

    Several processes may have the same folder, each at its own version for a moment. Nothing here raises for what the file system does: a page that cannot be
    read is a miss, one that cannot be written is lost. `say` hears of each cause once.
    """

    def __init__(self, folder: Path, limit: int, counts: Counts, say: Callable[[str], None] = print) -> None:
        self.folder, self.limit, self.counts, self._say = folder, limit, counts, say
        self.version = ""
        self.closed = False
        """While set nothing is found and nothing written: the weights are changing."""
        self._said: set[str] = set()
        self._size, self._looked = 0, -_LOOK_S
        self._seed = 0

    def serve(self, version: PolicyVersion) -> None:
        """From now on pages are of `version`; those of older ones are deleted, beside the caller."""
        self.version = str(version)
        self._seed = xxhash.xxh3_64_intdigest(f"{self.folder.name}/{version}/".encode())
        self._looked = -_LOOK_S
        old: list[Path] = []
        try:
            (self.folder / self.version).mkdir(parents=True, exist_ok=True)
            for other in self.folder.iterdir():
                if _is_older(other.name, version):
                    gone = self.folder / f".{uuid.uuid4().hex}"
                    with contextlib.suppress(FileNotFoundError):  # another engine was faster
                        other.rename(gone)
                        old.append(gone)
        except OSError as error:
            self._tell(error)
        if old:
            threading.Thread(target=_remove_folders, args=(old,), daemon=True).start()

    def has(self, key: str) -> bool:
        return not self.closed and os.path.exists(self._path(key))

    def read(self, key: str, into: memoryview) -> bool:
        """Fills `into` with the page, or says False; `into` may then hold anything."""
        if self.closed:
            return False
        path, began = self._path(key), time.perf_counter()
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        header = bytearray(_HEADER.size)
        try:
            got = os.readv(fd, [header, into])
            whole = got == len(header) + len(into) == os.fstat(fd).st_size
            os.utime(fd)
        except OSError as error:
            self._tell(error)
            whole = False
        finally:
            os.close(fd)
        if not whole or bytes(header) != self._header(key, into):
            self.counts.add("bad")
            self._remove(path)
            return False
        self._count("read", len(into), began)
        return True

    def write(self, key: str, page: memoryview) -> bool:
        """Keeps the page, and says whether it is there now."""
        if self.closed:
            self.counts.add("discarded")
            return False
        path, began = self._path(key), time.perf_counter()
        if os.path.exists(path):
            return True
        nbytes = _HEADER.size + len(page)
        if not self._room(nbytes):
            self.counts.add("full")
            return False
        temporary = path.with_name(f".{uuid.uuid4().hex}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if os.writev(fd, [self._header(key, page), page]) != nbytes:
                    raise OSError("there is no room on the disk")
            finally:
                os.close(fd)
            if self.closed:  # the weights have changed while it was written
                raise InterruptedError
            os.replace(temporary, path)
        except (InterruptedError, FileNotFoundError):  # or another engine has the new weights already
            self.counts.add("discarded")
            self._remove(temporary)
            return False
        except OSError as error:
            self._tell(error)
            self.counts.add("full")
            self._remove(temporary)
            return False
        self._size += nbytes
        self._count("written", len(page), began)
        return True

    def _count(self, what: str, nbytes: int, began: float) -> None:
        self.counts.add(what)
        self.counts.add(f"{what}_bytes", nbytes)
        self.counts.add(f"{what}_us", round((time.perf_counter() - began) * 1e6))

    def _path(self, key: str) -> Path:
        return self.folder / self.version / key

    def _header(self, key: str, page: memoryview) -> bytes:
        seed = xxhash.xxh3_64_intdigest(key.encode(), self._seed)
        return _HEADER.pack(_MAGIC, len(page), xxhash.xxh3_64_intdigest(page, seed))

    def _room(self, nbytes: int) -> bool:
        """Makes room below the limit, by deleting a tenth more than must be."""
        now = time.monotonic()
        if nbytes > self.limit:
            return False
        if self._size + nbytes <= self.limit and now - self._looked < _LOOK_S:
            return True
        files, self._looked = [], now
        try:
            with os.scandir(self.folder / self.version) as entries:
                for entry in entries:
                    try:
                        stat = entry.stat()
                    except FileNotFoundError:  # another engine evicts too
                        continue
                    files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        except FileNotFoundError:  # another engine has the new weights already
            self._size = 0
            return True
        except OSError as error:
            self._tell(error)
            return False
        self._size = sum(size for _, size, _ in files)
        if self._size + nbytes <= self.limit:
            return True
        for _, size, path in sorted(files):
            if self._size + nbytes <= self.limit * 0.9:
                break
            self._remove(Path(path))
            self._size -= size
            self.counts.add("evicted")
        return self._size + nbytes <= self.limit

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):  # another engine was faster, or its version is gone
            path.unlink()

    def _tell(self, error: OSError) -> None:
        cause = error.strerror or str(error)
        if cause not in self._said:
            self._said.add(cause)
            self._say(f"KV is computed anew where it cannot be kept in {self.folder}: {error}")


def _is_older(name: str, version: PolicyVersion) -> bool:
    try:
        return PolicyVersion.parse(name) < version
    except ValueError:
        return False  # it is being deleted, or is none of ours


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, lives: Callable[[str], bool]) -> list[str]:
    """Deletes what runs that are gone have left in `folder`; `lives(token)` tells of a run. Returns their tokens."""
    gone = []
    for old in folder.glob("mw-*-kv"):
        token = old.name.removeprefix("mw-").removesuffix("-kv")
        if not lives(token):
            shutil.rmtree(old, ignore_errors=True)
            gone.append(token)
    return gone
