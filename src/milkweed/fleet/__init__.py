"""Mesh files to live meshes on Monarch: hosts, replicas, calls with deadlines, and nothing left behind.

`from milkweed.fleet import Fleet, Replica, Actor, endpoint, concurrent_endpoint`; names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milkweed.fleet.fleet import Fleet
    from milkweed.fleet.monarch_compat import Actor, concurrent_endpoint, endpoint
    from milkweed.fleet.replica import Replica

_HOMES = {
    "Fleet": "fleet",
    "Replica": "replica",
    "Host": "host",
    "Actor": "monarch_compat",
    "endpoint": "monarch_compat",
    "concurrent_endpoint": "monarch_compat",
}

__all__ = ["Actor", "Fleet", "Host", "Replica", "concurrent_endpoint", "endpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"milkweed.fleet.{_HOMES[name]}"), name)
