"""A trainer rank's weights on their way out: its pieces packed for the engines, in its arena or in their host's slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Grant, RankManifest
from milkweed.transfer.packing import GrantedSlots, Packing
from milkweed.transfer.plan import Box, EngineLayout
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.training.shards import Piece


class Sender:
    """Publishes what `pieces()` holds. `name` is the rank's in errors and in its NIXL agent's name."""

    def __init__(self, name: str, rank: int, pieces: Callable[[], Sequence[Piece]]) -> None:
        from milkweed.transfer.publisher import Publisher

        self._pieces = pieces
        self.publisher = Publisher(name, rank)
        self._packings: dict[tuple[str, str], Packing] = {}
        self._slots = GrantedSlots()

    def adopt(self, layout: bytes, dtype: str) -> tuple[list[Box], int]:
        """Make the plan for engines of this layout (MessagePack) and the dtype sent ("": the engines'). Returns what
        this rank brings, and the length in bytes of the slot that takes it."""
        engine = msgspec.msgpack.decode(layout, type=EngineLayout)
        boxes = [(p.name, p.offsets, tuple(p.tensor().shape)) for p in self._pieces()]
        packing = Packing(engine, boxes, dtype)
        self._packings[packing.target.layout, dtype] = packing
        return boxes, packing.target.nbytes

    def reaches(self, grant: Grant) -> bool:
        """Whether this rank can fill the slot: it is on the same host."""
        try:
            self._slots.open(grant)
        except TransferError:
            return False
        return True

    def place(self, grants: Sequence[Grant], layout: str, dtype: str) -> int:
        """Copy this rank's part straight into the granted slots. Returns the bytes of one."""
        packing = self._packing(layout, dtype)
        for grant in grants:
            slot = self._slots.open(grant)
            if grant.nbytes != packing.target.nbytes:
                raise TransferError(f"the slot in {grant.path} has {grant.nbytes} bytes, not {packing.target.nbytes}")
            packing.place([p.tensor() for p in self._pieces()], slot)
        return packing.payload

    def publish(
        self, version: PolicyVersion, readers: Sequence[str], ttl_s: float, layout: str, dtype: str
    ) -> RankManifest | None:
        """Pack this rank's part into its arena, for `readers` to fetch; None where it has none."""
        packing = self._packing(layout, dtype)
        if not packing.payload:
            return None
        return self.publisher.publish_packed(version, packing, [p.tensor() for p in self._pieces()], readers, ttl_s)

    def _packing(self, layout: str, dtype: str) -> Packing:
        found = self._packings.get((layout, dtype))
        if found is None:
            raise TransferError(f"no plan was made for engines {layout} with dtype {dtype or 'as it is'}")
        return found
