"""A tiny actor in every process of a replica: says which process it is."""

from __future__ import annotations

import os
import socket

from milkweed.fleet.monarch_compat import Actor, endpoint


class Agent(Actor):
    @endpoint
    async def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    @endpoint
    async def free_port(self) -> int:
        """A TCP port of this machine that was free a moment ago."""
        with socket.socket() as s:
            s.bind(("", 0))
            return int(s.getsockname()[1])
