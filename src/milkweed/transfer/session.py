"""One NIXL agent of a reader, with the private buffer it reads into: used together, dropped together."""

from __future__ import annotations

from typing import Any

from milkweed.transfer.arena import Arena
from milkweed.transfer.manifest import RankManifest
from milkweed.transfer.nixl import Agent, Read

KEPT = 64
"""Sets of prepared reads kept."""


class Session:
    """An agent, the private buffer it reads into and the reads planned with them. Dropped whole after any failure: an
    abandoned READ may still write into its buffer, which therefore is never used again."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.arena = Arena(nbytes)
        self.agent = Agent(name, progress=False)
        self.agent.register(self.arena)
        self.reads: dict[tuple, list[Read]] = {}
        self._memories: list[Any] = []

    def admit(self, memory: Any) -> None:
        """Let reads land in `memory` too; it is kept alive as long as the session."""
        if all(m is not memory for m in self._memories):
            self.agent.register(memory)
            self._memories.append(memory)

    def plan_into(self, rank: RankManifest, pieces: tuple[tuple[int, int], ...], places: tuple[int, ...]) -> list[Read]:
        """A READ of each piece of the rank's slot to the address given for it; prepared once."""
        self.agent.add_peer(rank.agent, rank.metadata)
        key = (rank.agent, rank.address, pieces, places)
        if key not in self.reads:
            if len(self.reads) > KEPT:  # updates that change little never ask for the same again
                self.reads.clear()
            self.reads[key] = self.agent.prepare_reads(places, rank.agent, rank.address, pieces)
        return self.reads[key]

    def plan(self, rank: RankManifest, at: int) -> list[Read]:
        """A READ for each chunk of the rank's slot, into the buffer from `at` on; prepared once for each slot."""
        self.agent.add_peer(rank.agent, rank.metadata)
        pieces = tuple((c.offset, c.nbytes) for c in rank.chunks)
        key = (rank.agent, rank.address, at, pieces)
        if key not in self.reads:
            self.reads[key] = self.agent.prepare_reads(self.arena.address + at, rank.agent, rank.address, pieces)
        return self.reads[key]

    def forget_others(self, agents: set[str]) -> None:
        """Drop the peers that the current manifest does not name: earlier incarnations of its ranks."""
        for gone in self.agent.peers - agents:
            self.reads = {key: reads for key, reads in self.reads.items() if key[0] != gone}
            self.agent.remove_peer(gone)

    def close(self) -> None:
        self.reads.clear()
        self.agent.close()
