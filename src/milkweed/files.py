"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write, fsync, rename: the file is the old one or the new one, never half of it, and nothing is left beside it.

    Without `durable` it is not fsynced: whole after the death of a process, not after that of the machine. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
