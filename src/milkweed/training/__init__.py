"""The policy on TorchTitan: one process or many, trained by losses sent from the controller. Names load on first use.

`Trainer` is the controller's handle; `TrainerConfig` what it is told; `TrainerRank` the same without Monarch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milkweed.training.actor import TrainerActor
    from milkweed.training.config import TrainerConfig
    from milkweed.training.rank import TrainerRank
    from milkweed.training.trainer import Trainer

_HOMES = {"Trainer": "trainer", "TrainerConfig": "config", "TrainerActor": "actor", "TrainerRank": "rank"}

__all__ = ["Trainer", "TrainerActor", "TrainerConfig", "TrainerRank"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"milkweed.training.{_HOMES[name]}"), name)
