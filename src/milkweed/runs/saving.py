"""A run's checkpoints: written while it goes on, counted once they are whole, and waited for where the disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milkweed.errors import DataError, no_room
from milkweed.runs.mesh import Mesh, whole
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.observe.view import View
    from milkweed.runs.flow import Flow

FULL_S = 2.0
"""Between two attempts at a full disk."""


class Saving:
    """Of one run. `state` is what goes into the next checkpoint beside the weights."""

    def __init__(self, mesh: Mesh, view: View, state: Callable[[], dict[str, Any]]) -> None:
        self.mesh, self.view, self._state = mesh, view, state
        self.flow: Flow | None = None
        self.under_way: PolicyVersion | None = None
        """What a checkpoint is being written of."""

    async def write(self, *, wait: bool) -> None:
        """Writes one; without `wait` it is whole later. On a full disk the run waits for room, and says so."""
        wait = not await self._former() or wait
        full = False
        while True:
            try:
                await self._begin()
                if wait:
                    await self.written()
            except DataError as error:
                if not no_room(error):
                    raise
                if not full:
                    self.view.say(f"the run waits for room on the disk: {error}")
                full = wait = True
                self.under_way = None
                await asyncio.sleep(FULL_S)
            else:
                if full:
                    self.view.say(f"there is room again: checkpoint {self.mesh.version.step} is written")
                return

    async def look(self) -> None:
        """Counts the checkpoint that is being written once it is whole; where the disk had no room for it, writes
        another."""
        assert self.mesh.trainer is not None
        try:
            if self.under_way is not None and await self.mesh.trainer.saved():
                self._counted()
        except DataError as error:
            if not no_room(error):
                raise
            self.under_way = None
            await self.write(wait=True)

    async def written(self, deadline_s: float | None = None) -> None:
        """Waits for the checkpoint that is being written, if one is. Raises what writing it raised."""
        assert self.mesh.trainer is not None
        if self.under_way is not None:
            await whole(self.mesh.trainer.saved(wait=True, deadline_s=deadline_s))
            self._counted()

    async def _former(self) -> bool:
        """Whether the one before has become whole; the one to come takes its place where the disk had no room."""
        try:
            await self.written()
        except DataError as error:
            if not no_room(error):
                raise
            self.under_way = None
            return False
        return True

    async def _begin(self) -> None:
        assert self.mesh.trainer is not None
        if self.flow is not None:
            await self.flow.before_checkpoint()
        state = self._state()
        if self.mesh.critic is not None:  # first: the policy's checkpoint is the one that counts, and names the critic's
            await whole(self.mesh.critic.save())
            state["critic"] = self.mesh.critic.version.step
        await whole(self.mesh.trainer.save(state, wait=False))
        self.under_way = self.mesh.version

    def _counted(self) -> None:
        version, self.under_way = self.under_way, None
        if self.flow is not None and version is not None:
            self.flow.after_checkpoint(version)
