"""What a trainer is told: learning rate and schedule, sizes, degrees of parallelism."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from milkweed.errors import ConfigError

DTYPES = ("float32", "bfloat16")


class TrainerConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Configuration of one policy's trainer. Raises ConfigError, naming the key, on values that cannot be meant."""

    lr: float = 1e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled (AdamW); not applied to norms and biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly to `lr`."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the rate falls from the end of the warm-up to `min_lr` at `total_steps`."""
    total_steps: int = 0
    """Optimiser step at which the decay ends; 0: at the last step of the run."""
    min_lr: float = 0.0
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 or below: no clipping."""
    seed: int = 0
    seq_len: int = 1024
    """Longest row, in tokens."""
    micro_rows: int = 8
    """Rows of one forward and backward pass on one rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the forward and backward passes compute in; master weights and optimiser are always float32."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; 0 keeps all (1 is refused: the last may be half written)."""
    copy_every: int = 0
    """Steps between copies of weights and optimiser in the host's memory (12 bytes a parameter each, two at most), from
    which ranks that died come back; 0: from the last checkpoint."""
    threads: int = 1
    """CPU threads of each rank."""
    data_parallel_shard: int = 1
    data_parallel_replicate: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    collective_timeout_s: float = 300.0
    """How long a rank waits in a collective for the others."""

    def __post_init__(self) -> None:
        def need(ok: bool, key: str, what: str) -> None:
            if not ok:
                raise ConfigError(f"trainer.{key} {what}, not {getattr(self, key)!r}")

        need(math.isfinite(self.lr) and self.lr >= 0, "lr", "must be 0 or above")
        need(math.isfinite(self.min_lr) and 0 <= self.min_lr, "min_lr", "must be 0 or above")
        need(self.weight_decay >= 0, "weight_decay", "must be 0 or above")
        need(all(0 <= b < 1 for b in self.betas), "betas", "must lie in [0, 1)")
        need(self.warmup_steps >= 0, "warmup_steps", "must be 0 or above")
        need(
            self.decay == "none" or self.total_steps == 0 or self.total_steps > self.warmup_steps,
            "total_steps",
            f"must be above trainer.warmup_steps ({self.warmup_steps}) where trainer.decay is {self.decay!r}",
        )
        need(self.keep_checkpoints >= 0 and self.keep_checkpoints != 1, "keep_checkpoints", "must be 0 (all), or 2 or more")
        need(self.copy_every >= 0, "copy_every", "must be 0 (none) or above")
        for key in ("seq_len", "micro_rows", "threads"):
            need(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("data_parallel_shard", "data_parallel_replicate", "tensor_parallel", "context_parallel"):
            need(getattr(self, key) >= 1, key, "must be at least 1")
        need(self.collective_timeout_s > 0, "collective_timeout_s", "must be above 0")

    @property
    def data_parallel(self) -> int:
        """Ranks that see different rows."""
        return self.data_parallel_shard * self.data_parallel_replicate

    @property
    def world_size(self) -> int:
        """Processes of the trainer."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    @property
    def row_multiple(self) -> int:
        """Row lengths are padded to a multiple of this, so that they divide over tensor and context parallel ranks."""
        return self.tensor_parallel * self.context_parallel

    def lr_at(self, step: int, peak: float | None = None) -> float:
        """Learning rate of optimiser step `step` (the first is 0), with `peak` in place of `lr` if given."""
        peak = self.lr if peak is None else peak
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        if self.decay == "none" or not self.total_steps:
            return peak
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return min(self.min_lr, peak) + (peak - min(self.min_lr, peak)) * left
