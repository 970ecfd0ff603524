"""What lives as long as its process stays out of garbage collections: with torch imported, one full collection walks a
million objects and stops the process for a tenth of a second, about once a training step."""

from __future__ import annotations

import gc


def freeze() -> None:
    """Call it when a process is ready: what it holds by then is not walked again, until `thaw`."""
    gc.collect()
    gc.freeze()


def thaw() -> None:
    """Call it when what was frozen may be garbage."""
    gc.unfreeze()
