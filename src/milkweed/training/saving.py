"""What a rank keeps of itself: checkpoints on a disk, and copies in the host's memory that outlive it."""

from __future__ import annotations

from milkweed.errors import ConfigError, DataError
from milkweed.training.checkpoints import Checkpoints, Found
from milkweed.types import PolicyVersion


class Saving:
    """The part of a `TrainerRank` that saves and loads."""

    checkpoints: Checkpoints | None
    copies: Checkpoints | None
    version: PolicyVersion
    peak_lr: float

    def _store(self) -> Checkpoints:
        if self.checkpoints is None:
            raise ConfigError("this trainer was made without a run directory (or optimiser): it keeps no checkpoints")
        return self.checkpoints

    def save(self, state: str) -> str:
        """Begin to write a checkpoint of this version with the controller's `state` (JSON text) inside. Returns its
        folder; it is whole once `saved` says so."""
        return self._store().save(self.version, state, self.peak_lr)

    def saved(self, *, wait: bool = False) -> bool:
        """Whether this rank has written its part of what was saved last; with `wait`, until all have."""
        if wait:
            self._store().finish()
        return self._store().done()

    def load(self, incarnation: int | None = None, step: int | None = None) -> str | None:
        """Go back to the latest whole checkpoint, or that of `step`; the state kept inside, or None where there is none.

        The version's incarnation becomes `incarnation`, or one more than the checkpoint's.
        """
        return self._begin_at(self._store().load(step), incarnation)

    def copy(self) -> None:
        """Begin to copy this version into memory; it is whole once `copied` says so."""
        if self.copies is not None:
            self.copies.save(self.version, "", self.peak_lr)

    def copied(self) -> bool:
        """Whether this rank has its part of the last copy."""
        return self.copies is None or self.copies.done()

    def restore(self, incarnation: int, step: int) -> PolicyVersion:
        """Go back to the copy of `step`; the version. Raises DataError where it is not there or not whole."""
        if self.copies is None or (found := self.copies.load(step)) is None:
            raise DataError(f"there is no copy of step {step} in memory")
        self._begin_at(found, incarnation)
        return self.version

    def _begin_at(self, found: Found | None, incarnation: int | None) -> str | None:
        if found is None:
            if incarnation is not None:  # a life that begins anew shares no name with what an earlier one trained
                self.version = PolicyVersion(incarnation, self.version.step)
            return None
        self.peak_lr = found.peak_lr
        saved = found.version.incarnation
        self.version = PolicyVersion(saved + 1 if incarnation is None else incarnation, found.version.step)
        return found.state
