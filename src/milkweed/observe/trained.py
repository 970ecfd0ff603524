"""What the trainer thought of the tokens it trained on: `logprobs/STEP` in the run directory, for `milkweed show`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from milkweed.errors import DataError, no_room
from milkweed.files import write_atomic

if TYPE_CHECKING:
    import torch

    from milkweed.types import Batch


class TrainedLogprobs:
    """Keeps the log-probs of every sequence of a step's batch under the weights that the step began with; those of the
    last `keep` steps (0: all)."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self._folder, self._keep = folder / "logprobs", keep
        self._waiting: dict[int, bytes] = {}

    def write(self, step: int, batch: Batch, logprobs: torch.Tensor) -> None:
        """`logprobs` `[rows, seq]` of the update that made `step`. Batches that no engine sampled are left out.

        What a full disk has no room for waits in memory until a later call finds some; there is no file of half a step."""
        if not bool((batch.logprobs != 0).any()):
            return
        tokens, segments = batch.tokens.flatten().numpy().astype(np.int32), batch.segments.flatten().numpy()
        values = logprobs.float().flatten().numpy()
        # a sequence lies in one piece, and its number is its own: where the number changes, another begins
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        found = {_key(tokens[a:b]): values[a:b].tobytes() for a, b in pairwise(edges) if b > a and segments[a] >= 0}
        self._waiting[step] = msgspec.msgpack.encode(found)
        self._write()

    def _write(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            for step, data in list(self._waiting.items()):
                write_atomic(self._folder / str(step), data, durable=False)  # on the loop's path
                del self._waiting[step]
                if self._keep:
                    (self._folder / str(step - self._keep)).unlink(missing_ok=True)
        except OSError as error:
            if not no_room(error):
                raise

    def close(self) -> None:
        """Writes what waits, if there is room."""
        if self._waiting:
            self._write()


def read_trained(folder: Path, step: int) -> TrainedStep:
    """Those of `step` of the run in `folder`. Raises DataError where they are not kept."""
    path = folder / "logprobs" / str(step)
    if not path.exists():
        raise DataError(f"{path} does not exist: step {step} trained nothing sampled, or keep_tokens_steps let it go")
    return TrainedStep(msgspec.msgpack.decode(path.read_bytes(), type=dict[bytes, bytes]))


class TrainedStep:
    """A step's log-probs by sequence."""

    def __init__(self, found: dict[bytes, bytes]) -> None:
        self._found = found

    def of(self, token_ids: Sequence[int]) -> list[float] | None:
        """One log-prob a token (0 at the first); None for a sequence that was not in the batch."""
        data = self._found.get(_key(token_ids))
        return None if data is None else list(array("f", data))


def _key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int32), digest_size=12).digest()
