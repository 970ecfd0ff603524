"""How many optimiser steps lie between two versions of a run, also where it went back to a checkpoint in between."""

from __future__ import annotations

from milkweed.types import PolicyVersion


class Lineage:
    """The lives of a run as a tree of versions. `shared` says for each incarnation before `previous` up to which step it
    has the same weights as that one; `reached` is the same for `previous` and the present life: the checkpoint, then
    further with each step trained again from the same groups.

    >>> line = Lineage({}, previous=0, reached=5)  # life 0 was gone back from, to the checkpoint of step 5
    >>> line.lag(PolicyVersion(0, 4), PolicyVersion(1, 6)), line.lag(PolicyVersion(0, 7), PolicyVersion(1, 6))
    (2, 3)
    """

    def __init__(self, shared: dict[int, int] | None = None, previous: int | None = None, reached: int = 0) -> None:
        self.shared, self.previous, self.reached = shared or {}, previous, reached

    def lag(self, sampled: PolicyVersion, now: PolicyVersion) -> int:
        """Optimiser steps from `sampled` to `now`, over their last common ancestor. Weights that were lost count twice:
        back to the ancestor, and forth."""
        if sampled.incarnation == now.incarnation:
            return now.step - sampled.step
        common = self.reached
        if sampled.incarnation != self.previous:
            common = min(common, self.shared.get(sampled.incarnation, 0))
        common = min(common, sampled.step)
        return (sampled.step - common) + (now.step - common)
