"""How many optimiser steps lie between two versions of a run, also where it went back to a checkpoint in between."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from milkweed.types import PolicyVersion


class Lineage:
    """What each life of a run trained, step by step: two versions whose steps all trained the same groups in the same
    order are the same weights, whichever lives they are of.

    `lives`: `(incarnation, step it went back to, configuration)` of each, oldest first, the present one last; steps under
    different configurations are never the same. `steps`: `(incarnation, step, groups as JSON)`, oldest first.

    >>> line = Lineage([(0, 0, 0), (1, 2, 0)], [(0, 1, "[1]"), (0, 2, "[2]"), (0, 3, "[3]")])  # life 1 went back to step 2
    >>> line.lag(PolicyVersion(0, 3), PolicyVersion(1, 2))
    1
    >>> line.trained(PolicyVersion(1, 3), [3])  # the same group again
    >>> line.lag(PolicyVersion(0, 3), PolicyVersion(1, 3))
    0
    """

    def __init__(self, lives: Sequence[tuple[int, int, int]] = (), steps: Iterable[tuple[int, int, str]] = ()) -> None:
        self._lives = {incarnation: (resumed, configuration) for incarnation, resumed, configuration in lives}
        numbers = [incarnation for incarnation, *_ in lives]
        self._before = dict(zip(numbers[1:], numbers))
        self._chains: dict[int, dict[int, bytes]] = {incarnation: {} for incarnation in numbers}
        for incarnation, step, groups in steps:
            self._add(incarnation, step, groups)

    def trained(self, version: PolicyVersion, groups: Sequence[int]) -> None:
        """The step that made `version` trained these groups."""
        self._add(version.incarnation, version.step, json.dumps(list(groups)))

    def lag(self, sampled: PolicyVersion, now: PolicyVersion) -> int:
        """Optimiser steps from `sampled` to `now`, over the last weights that both lives had. Weights that were lost count
        twice: back to those, and forth."""
        if sampled.incarnation == now.incarnation:
            return now.step - sampled.step
        common = min(sampled.step, now.step)
        while common and ((chain := self._at(sampled.incarnation, common)) is None or chain != self._at(now.incarnation, common)):
            common -= 1
        return (sampled.step - common) + (now.step - common)

    def _at(self, incarnation: int | None, step: int) -> bytes | None:
        """All that was trained up to `step` of that life, as a hash; None where it is not known."""
        while incarnation is not None and step <= self._lives.get(incarnation, (0, 0))[0]:
            incarnation = self._before.get(incarnation)  # the step was an earlier life's
        return self._chains.get(incarnation, {}).get(step) if incarnation is not None else None

    def _add(self, incarnation: int, step: int, groups: str) -> None:
        before = self._at(incarnation, step - 1) or (b"" if step == 1 else b"?")
        configuration = self._lives.get(incarnation, (0, 0))[1]
        digest = hashlib.blake2b(before + f"{configuration}/{groups}".encode(), digest_size=16).digest()
        self._chains.setdefault(incarnation, {})[step] = digest
