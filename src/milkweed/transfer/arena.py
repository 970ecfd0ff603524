"""Memory that NIXL reads from and into: allocated once, touched once, registered once."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from milkweed.errors import TransferError
from milkweed.transfer.layout import aligned

HUGE = 2 << 20


class Arena:
    """`nbytes` of this process's host memory, zeroed, aligned to (and where the kernel allows made of) huge pages.

    Every page is touched here, since first-touched memory transfers at a small fraction of the speed. The memory lives
    as long as anything views it. `kind` is NIXL's memory type; an arena in device memory would differ in it and in
    `bytes`.
    """

    kind = "DRAM"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(max(nbytes, 1), HUGE)
        try:
            memory = mmap.mmap(-1, self.nbytes + HUGE)
        except OSError as error:
            raise TransferError(f"no memory for an arena of {self.nbytes} bytes: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked child must neither copy nor keep what NIXL has registered
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE
        self.bytes = whole[start : start + self.nbytes]
        """The memory, uint8 `[nbytes]`."""
        self.bytes[:: mmap.PAGESIZE] = 0

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data
