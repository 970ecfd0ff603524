"""Files of lines that people and other programs read while they grow."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from milkweed.errors import no_room


class Lines:
    """Appends to `path`, each line whole or not there. What a full disk has no room for waits in memory until a later
    call finds some, so that whoever writes down what happened never ends what happens."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.waiting: deque[bytes] = deque()

    def add(self, *lines: str) -> None:
        """Raises OSError for anything but a full disk."""
        self.waiting.extend(line.encode() + b"\n" for line in lines)
        end = os.fstat(self._file).st_size
        try:
            while self.waiting:
                data = self.waiting[0]
                if os.write(self._file, data) < len(data):  # the rest had no room
                    os.ftruncate(self._file, end)
                    return
                end += len(data)
                self.waiting.popleft()
        except OSError as error:
            if not no_room(error):
                raise

    def close(self) -> None:
        """Writes what waits, if there is room."""
        if self._file >= 0:
            self.add()
            os.close(self._file)
            self._file = -1
