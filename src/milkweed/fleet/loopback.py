"""Keeps what other people's libraries open on loopback, where all hosts of a mesh are on one machine.

Private here: `torch.distributed.rendezvous._create_c10d_store`, read from torch 2.13: its store listens on every interface.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",  # NIXL's; between processes of one machine it copies without it
}
"""For every process; where the user's environment says otherwise, that is what holds."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def opened(environment: Mapping[str, str]) -> list[str]:
    """What to say of an environment that lets something of this out of loopback."""
    others = {k: environment[k] for k, v in ENVIRONMENT.items() if environment.get(k, v) != v}
    return [
        f"{name}={value} in the environment: trainer, engines or pullers listen there too, open to every machine that reaches it, "
        "without a password"
        for name, value in others.items()
    ]


def keep_stores() -> None:
    """From here on a store of `torch.distributed` for an address of loopback listens there only. Harmless twice."""
    from torch.distributed import TCPStore

    rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of this name
    create: Any = rendezvous._create_c10d_store
    if getattr(create, "milkweed", False):
        return

    def kept(hostname: str, port: int, rank: int, world_size: int | None, timeout: timedelta, use_libuv: bool = True) -> Any:
        if rank != 0 or hostname not in LOOPBACK or rendezvous._torchelastic_use_agent_store():
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        listener = socket.socket(socket.AF_INET6 if ":" in hostname else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((hostname, port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        # the store closes it
        return TCPStore(hostname, port, world_size, True, timeout, master_listen_fd=listener.detach(), use_libuv=use_libuv)

    kept.milkweed = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = kept
