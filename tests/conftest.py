"""What all tests share."""

from __future__ import annotations

import atexit
import os
import signal
import sys

# a shell starts what it puts in the background with SIGINT ignored, which the processes that tests interrupt would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

_status = 0


def pytest_sessionfinish(session, exitstatus):
    global _status
    _status = int(exitstatus)


def _leave() -> None:
    """Ends the process before the interpreter is torn down: a thread of Monarch's (0.7.0) that wants the interpreter at
    that moment is killed by Python 3.11 in a way that aborts the whole process, and a good run would count as bad."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)


atexit.register(_leave)  # registered first, so it runs after all other exit handlers
