"""The errors Milkweed raises: one small tree, each naming its peer, key, file or sample."""

from __future__ import annotations

import errno


def no_room(error: BaseException) -> bool:
    """Whether a full disk is behind `error`, whoever passed it on."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(text in str(seen) for text in ("disk is full", "No space left on device", "Disk quota exceeded")):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class MilkweedError(Exception):
    """Base of every error that Milkweed raises on purpose."""


class ConfigError(MilkweedError):
    """A configuration, mesh file or argument is wrong; the message names the key, its place and the mend."""


class DataError(MilkweedError):
    """A prompt, data set, tokenizer or model folder cannot be used; the message names the file or the item."""


class RunLocked(MilkweedError):
    """Another live controller holds the run directory."""


class FleetError(MilkweedError):
    """Something remote failed. `peer` is the replica's name, `kind` one of the words below.

    died: the process is gone. hung: a deadline passed. raised: its code raised (the replica lives).
    refused: it never came up. lost: its host is gone. wrong, slow: it answers, but not as its peers do.
    """

    def __init__(self, peer: str, kind: str, cause: str) -> None:
        super().__init__(f"{peer} {kind}: {cause}")
        self.peer, self.kind, self.cause = peer, kind, cause

    def __reduce__(self):
        return type(self), (self.peer, self.kind, self.cause)


class PeerDied(FleetError):
    """The replica's process (or host) is gone; nothing more will be heard of it."""


class DeadlineExceeded(FleetError):
    """The replica did not answer within its deadline; it may be hung, stopped or merely slow."""


class RemoteError(FleetError):
    """Code on the replica raised; the replica itself is well. `cause` holds the remote traceback."""


class TransferError(MilkweedError):
    """Weights or KV did not arrive whole; what was served before is still served."""


class RewardError(MilkweedError):
    """A reward function failed on one sample: it raised, gave no finite number, or passed its deadline."""


class EnvironmentFailed(MilkweedError):
    """An environment or a tool failed by its own fault, not the policy's: its trajectory is tried again or dropped, and
    never trained as a zero."""


class StepRefused(MilkweedError):
    """An optimiser step was not applied: the loss or the gradient was not finite, or the loss function raised.
    Parameters, optimiser and version are what they were."""
