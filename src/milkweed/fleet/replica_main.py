"""The first code of every process of a replica: redirects its output, names its semaphores, becomes a Monarch proc.

It runs before Monarch and before any actor, so that a failing import is found in the replica's log too.
"""

from __future__ import annotations

import os
import sys


def redirect(log: str) -> None:
    """Send standard output and error to the end of `log`, those of later children and of C code too."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


def name_semaphores(token: str) -> None:
    """Let `multiprocessing`, here and in children, make semaphores that a sweep finds: /dev/shm/sem.mw-TOKEN-*."""
    from multiprocessing import process

    process.current_process()._config["semprefix"] = f"/mw-{token}"


if __name__ == "__main__":
    redirect(os.environ["MILKWEED_LOG"])
    name_semaphores(os.environ["MILKWEED_TOKEN"])
    # `faulthandler` writes where a crash in C code happened, into the log just opened
    import faulthandler

    faulthandler.enable()
    from milkweed.fleet.credentials import drop_empty
    from milkweed.fleet.monarch_compat import run_replica_process

    drop_empty(os.environ)  # type: ignore[arg-type]
    run_replica_process()
    sys.exit(0)
