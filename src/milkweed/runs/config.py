"""What every recipe's configuration has; a recipe subclasses it with its own keys."""

from __future__ import annotations

from typing import Literal

import msgspec

from milkweed.errors import ConfigError
from milkweed.training.config import TrainerConfig
from milkweed.types import Sampling


class RunConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keys that every recipe understands. A recipe's class adds its own, and other defaults."""

    mesh: str = "local"
    """Mesh file, or the name of one that comes with Milkweed."""
    run_dir: str = ""
    """The run's directory; a run that is there already is resumed. Default: a new one under runs/."""
    seed: int = 0
    """Seed of the data's order, the model and the sampling."""
    steps: int = 100
    """Optimiser steps."""
    sampling: Sampling = Sampling()
    """How completions are sampled."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimiser, schedule, row length."""
    eval_every: int = 20
    """Steps between evaluations on held-out prompts."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    staleness: int = 0
    """Steps that sampling may be ahead of training; 0 samples, trains and publishes in turns."""
    late: Literal["mask", "wait"] = "mask"
    """What is done with a trajectory whose first tokens come to be over that bound: they are not trained ("mask"), or the batch waits for it before that ("wait")."""
    oversample: float = 0.0
    """Further groups issued a step, as a share; when a batch is full, the tail of it is given up."""
    retries: int = 1
    """Further attempts at a trajectory whose environment, reward or engine failed."""
    keep_tokens_steps: int = 0
    """Steps for which the ledger keeps the tokens of what was trained; 0 keeps them all."""
    deterministic: bool = False
    """Make sampling a function of seed, prompt, sample and turn, whatever else the engines do; slower."""
    trajectory_deadline_s: float = 300.0
    """Seconds that one trajectory may take."""
    samples_logged: int = 4
    """Groups a step written to samples.jsonl; 0 writes all."""
    wandb: str = ""
    """Weights & Biases project; empty for none."""
    allow_changes: bool = False
    """Accept a configuration other than the one that a resumed run began with."""

    def __post_init__(self) -> None:
        for key, least in (("seed", 0), ("steps", 1), ("eval_every", 1), ("checkpoint_every", 1), ("samples_logged", 0), ("staleness", 0), ("oversample", 0), ("retries", 0), ("keep_tokens_steps", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} must be at least {least}, not {getattr(self, key)}")
        if not self.trajectory_deadline_s > 0:
            raise ConfigError(f"trajectory_deadline_s must be above 0, not {self.trajectory_deadline_s}")
