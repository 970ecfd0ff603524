"""Append-only files for token arrays: each record framed with its length and checksum, torn tails found and cut."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from milkweed.errors import DataError

HEADER = struct.Struct("<4sII")  # magic, payload bytes, CRC-32 of both of these and the payload
MAGIC = b"MWT1"


def frame(payload: bytes) -> bytes:
    """`payload` as it stands in a segment."""
    size = len(payload)
    return HEADER.pack(MAGIC, size, _checksum(size, payload)) + payload


def _checksum(size: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(size.to_bytes(4, "little")))


def scan(path: Path) -> Iterator[tuple[int, int]]:
    """`(offset, end)` of each whole record from the start of the file; ends at the first that is torn."""
    with path.open("rb") as file:
        offset = 0
        while header := file.read(HEADER.size):
            if len(header) < HEADER.size:
                return
            magic, size, checksum = HEADER.unpack(header)
            payload = file.read(size) if magic == MAGIC else b""
            if magic != MAGIC or len(payload) < size or _checksum(size, payload) != checksum:
                return
            yield offset, offset + HEADER.size + size
            offset += HEADER.size + size


class Segments:
    """The segment files of one ledger. One writer; readers open files of their own.

    `append` returns where the record lies, `(segment, offset)`. A segment that has grown past `segment_bytes` is
    followed by the next one.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20) -> None:
        self.folder, self.segment_bytes = folder, segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int = -1
        self.number = max(self.numbers(), default=0)
        self._end = 0
        self._buffer: list[bytes] = []

    def numbers(self) -> list[int]:
        """The segments that are there, oldest first."""
        return sorted(int(p.stem) for p in self.folder.glob("*.seg"))

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.seg"

    def cut(self, known_end: dict[int, int]) -> int:
        """Cuts what was torn off each segment's tail, and what the index (`known_end`: segment to the end of its last
        record) does not know. Returns the bytes cut. Older segments are scanned only where shorter than they must be."""
        gone = 0
        for number in self.numbers():
            path, known = self.path(number), known_end.get(number, 0)
            size = path.stat().st_size
            if size == known and number != max(self.numbers()):
                continue
            whole = 0
            for _, end in scan(path):
                if end > known:
                    break
                whole = end
            if size > whole:
                os.truncate(path, whole)
                gone += size - whole
        return gone

    def append(self, payload: bytes) -> tuple[int, int]:
        """Adds one record; it is in the file after `write`."""
        if self._file < 0:
            self._open()
        if self._end >= self.segment_bytes:
            self.write(sync=True)
            os.close(self._file)
            self.number += 1
            self._open()
        place = (self.number, self._end)
        record = frame(payload)
        self._buffer.append(record)
        self._end += len(record)
        return place

    def _open(self) -> None:
        self._file = os.open(self.path(self.number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._end = os.fstat(self._file).st_size

    def write(self, *, sync: bool = False) -> None:
        """Hands what was appended to the kernel, so that a killed process loses none of it; `sync`: to the disk."""
        if self._buffer:
            data = memoryview(b"".join(self._buffer))
            self._buffer.clear()
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                self._buffer = [bytes(data)]  # what is in the file stays where it belongs; the rest follows it
                raise
        if sync and self._file >= 0:
            os.fsync(self._file)

    def read(self, segment: int, offset: int) -> bytes:
        """The record at a place. Raises DataError naming file and offset where it is torn, rotten or gone."""
        path = self.path(segment)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                header = file.read(HEADER.size)
                if len(header) == HEADER.size:
                    magic, size, checksum = HEADER.unpack(header)
                    if magic == MAGIC:
                        payload = file.read(size)
                        if len(payload) == size and _checksum(size, payload) == checksum:
                            return payload
        except FileNotFoundError:
            raise DataError(f"{path} is gone, and with it the record at {offset}") from None
        raise DataError(f"{path}: the record at byte {offset} is torn or has rotted (checksum)")

    def remove(self, number: int) -> int:
        """Deletes a segment that is not being written; its bytes, 0 if it is."""
        if number == self.number:
            return 0
        path = self.path(number)
        size = path.stat().st_size if path.exists() else 0
        path.unlink(missing_ok=True)
        return size

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.write(sync=True)
            finally:
                os.close(self._file)
                self._file = -1
