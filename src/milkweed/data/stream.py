"""An endless stream of prompts in seeded shuffles, whose position can be saved and restored."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from milkweed.errors import DataError
from milkweed.types import Prompt


class PromptStream:
    """Epoch after epoch over `prompts`, each epoch in its own order drawn from (seed, epoch).

    `state()` is JSON-able and says where the next `take` begins; `restore` refuses one of other prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        self.prompts = list(prompts)
        self.seed, self.shuffle = seed, shuffle
        self.fingerprint = fingerprint(self.prompts)
        self.epoch = self.index = 0
        self._order = self._shuffled()

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    @property
    def taken(self) -> int:
        """Prompts taken since the start of the first epoch."""
        return self.epoch * len(self.prompts) + self.index

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Runs on into the next epoch, whose order is its own."""
        if n < 1:
            raise DataError(f"take({n}): at least 1")
        out: list[Prompt] = []
        while len(out) < n:
            if self.index >= len(self._order):
                self.epoch, self.index = self.epoch + 1, 0
                self._order = self._shuffled()
            picked = self._order[self.index : self.index + n - len(out)]
            self.index += len(picked)
            out += [self.prompts[i] for i in picked]
        return out

    def at(self, position: int) -> Prompt:
        """The prompt that is taken when `taken` is `position`."""
        epoch, index = divmod(position, len(self.prompts))
        return self.prompts[(self._order if epoch == self.epoch else self._shuffled(epoch))[index]]

    def seek(self, position: int) -> None:
        """Go to where `taken` is `position`."""
        self.epoch, self.index = divmod(position, len(self.prompts))
        self._order = self._shuffled()

    def state(self) -> dict[str, Any]:
        """Where the next `take` begins."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Seed and shuffling are the state's, so the order is the one it was saved in.

        Raises DataError, changing nothing, if the state is of other prompts or is not one of ours.
        """
        try:
            epoch, index, seed = int(state["epoch"]), int(state["index"]), int(state["seed"])
            shuffle, known = bool(state["shuffle"]), str(state["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a prompt stream: {error!r}") from error
        if known != self.fingerprint:
            raise DataError(
                f"the saved position is in another data set (fingerprint {known}, this one has {self.fingerprint}, "
                f"{len(self.prompts)} prompts): resume with the prompts it was saved with"
            )
        if epoch < 0 or not 0 <= index <= len(self.prompts):
            raise DataError(f"a position of epoch {epoch}, index {index} is not in {len(self.prompts)} prompts")
        self.epoch, self.index, self.seed, self.shuffle = epoch, index, seed, shuffle
        self._order = self._shuffled()

    def _shuffled(self, epoch: int | None = None) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}:{self.epoch if epoch is None else epoch}").shuffle(order)
        return order


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of ids, messages and answers in order; rendered ids and `info` are left out."""
    digest = hashlib.blake2b(digest_size=12)
    encode = msgspec.json.Encoder(enc_hook=repr).encode
    for p in prompts:
        digest.update(encode([p.id, p.messages, p.answer]))
        digest.update(b"\n")
    return digest.hexdigest()
