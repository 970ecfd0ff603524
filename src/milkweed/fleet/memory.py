"""What lives as long as its process stays out of garbage collections: with torch imported, one full collection walks a
million objects and stops the process for a tenth of a second, about once a training step."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()  # whatever whoever imports this has chosen

def freeze() -> None:
    """Call it when a process is ready: what it holds by then is not walked again, until `thaw`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # the usual 700 are reached hundreds of times in a step


def thaw() -> None:
    """Call it when what was frozen may be garbage."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
