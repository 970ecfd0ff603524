"""Runs when Python starts (milkweed_sglang_cpu.pth): waits for two imports and acts just before each. Imports only sys.

sglang: refuse, in words, an environment in which this package would do harm.
torchvision: the registry's Linux wheel is a CUDA build whose extension does not load beside a CPU torch, so its import
dies where it registers fake kernels for operators nobody defined. With the names defined its pure-Python rest works.
"""

import sys

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _before_torchvision() -> None:
    import torch

    if torch.version.cuda is None:
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(f"torchvision::{operator}", _NMS)


def _before_sglang() -> None:
    from sglang_cpu.refuse import reasons

    found = reasons()
    if found:
        raise ImportError("milkweed-sglang-cpu refuses to run SGLang here:\n" + "\n".join(f"  - {r}" for r in found))


class _Watch:
    """A meta-path finder that finds nothing. An action that raises stays armed: the next import is refused as well."""

    actions = {"sglang": _before_sglang, "torchvision": _before_torchvision}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        action = cls.actions.get(name)
        if action is not None:
            action()
            cls.actions.pop(name, None)
            if not cls.actions:
                sys.meta_path.remove(cls)
        return None


if _Watch not in sys.meta_path:
    sys.meta_path.insert(0, _Watch)
