"""Copies of host memory by as many cores as are free: blocks are shared out as threads come to ask for them."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

Job = tuple[int, int, int] | Callable[[], object]
"""A copy as `(to, from, nbytes)` of addresses, or any other piece of work that leaves the GIL while it runs."""

BLOCK = 4 << 20
THREADS = 4
"""At most so many copy at once: more do not make a host's memory faster."""
_helpers: ThreadPoolExecutor | None = None


def copy(jobs: Iterable[Job]) -> None:
    """Do every job, in any order, large copies block by block. Raises what the first job that failed raised; others may
    be done or not by then, and none is running any more."""
    import torch

    work: list[Job] = []
    for job in jobs:
        if callable(job):
            if torch.get_num_threads() > 1:  # such a copy has threads of its own
                job()
            else:
                work.append(job)
            continue
        to, source, nbytes = job
        work += [(to + at, source + at, min(BLOCK, nbytes - at)) for at in range(0, nbytes, BLOCK)]
    share(work)


def share(work: Sequence[Job]) -> None:
    """As `copy`, of jobs that are small enough as they are."""
    turn, errors = itertools.count(), []

    def labour() -> None:
        # whoever is free takes the next, so a helper that gets no core delays nobody by more than one job
        while (i := next(turn)) < len(work) and not errors:
            job = work[i]
            try:
                if callable(job):
                    job()
                else:
                    ctypes.memmove(*job)
            except BaseException as error:  # raised in the caller's thread
                errors.append(error)

    count = min(THREADS, len(os.sched_getaffinity(0)), len(work)) - 1
    asked = [_pool().submit(labour) for _ in range(count)]
    labour()
    for each in asked:
        if not each.cancel():
            each.result()
    if errors:
        raise errors[0]


def _pool() -> ThreadPoolExecutor:
    global _helpers
    if _helpers is None:
        _helpers = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="mw-copy")
    return _helpers


def _forked() -> None:
    global _helpers
    _helpers = None  # a child has none of its parent's threads


os.register_at_fork(after_in_child=_forked)
