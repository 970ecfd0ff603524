"""Engines on the real fleet and the models that tell what they must say, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milkweed.config import load_mesh
from milkweed.fleet import Fleet
from milkweed.models import new_qwen3
from milkweed.rollout import Router
from milkweed.rollout.protocol import decode_report, encode
from milkweed.rollout.sglang_hooks import FAULTS
from milkweed.transfer.manifest import Staged, StagedTensor
from milkweed.types import Completion, PolicyVersion

VERSIONS = [PolicyVersion(0, i) for i in range(8)]
PROMPT = [40, 41, 42, 50, 60, 70]


class Rig:
    """Two engines and two models: `a`, which they start from, and `b`. Even versions are `a`, odd ones `b`."""

    def __init__(self, folder: Path, replicas: int = 2, tensor_parallel: int = 1, more: Sequence[str] = ()) -> None:
        self.runner = asyncio.Runner()
        small = {"hidden": 64, "layers": 2, "head_dim": 16, "intermediate": 128}
        # fresh weights give nearly even distributions; sharper ones make wrong weights, or a wrong temperature, show
        self.folders = [_sharpened(new_qwen3(folder / "ab"[i], seed=i, **small)) for i in (0, 1)]
        overrides = [f"rollout.replicas={replicas}", f"rollout.tensor_parallel={tensor_parallel}", *more]
        self.mesh = load_mesh("local", overrides)
        self.models: dict[int, Any] = {}
        self.files: list[Path] = []

    def up(self) -> None:
        os.environ[FAULTS] = "1"
        try:
            self.fleet = self.run(Fleet.start(self.mesh), 60)
            self.router = self.run(Router.spawn(self.fleet, str(self.folders[0])), 240)
        finally:
            del os.environ[FAULTS]

    def down(self) -> None:
        if hasattr(self, "router"):
            self.run(self.router.close(), 30)
        if hasattr(self, "fleet"):
            self.run(self.fleet.stop(), 30)
        for file in self.files:
            file.unlink(missing_ok=True)
        self.runner.close()

    def run(self, work: Any, deadline_s: float = 60.0) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(deadline_s):
                return await work

        return self.runner.run(within())

    def stage(self, version: PolicyVersion) -> Staged:
        """`version` in shared memory, as the puller leaves it."""
        import xxhash
        from safetensors.torch import load_file

        data, tensors = bytearray(), []
        for name, t in load_file(self.folders[version.step % 2] / "model.safetensors").items():
            raw = t.numpy().tobytes()
            tensors.append(StagedTensor(name, "float32", tuple(t.shape), len(data), len(raw)))
            data += raw
        file = Path(f"/dev/shm/mw-{self.fleet.token}-test-{version.step}")
        file.write_bytes(data)
        self.files.append(file)
        return Staged(version, str(file), 0, len(data), xxhash.xxh3_64_intdigest(bytes(data)), tensors)

    def model(self, version: PolicyVersion) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        which = version.step % 2
        if which not in self.models:
            torch.set_num_threads(1)
            self.models[which] = AutoModelForCausalLM.from_pretrained(self.folders[which], dtype=torch.float32).eval()
        return self.models[which]

    def worst(self, c: Completion) -> float:
        """The largest difference between a completion's log-probs and those of the model its spans name."""
        import torch

        ids, n = torch.tensor([c.prompt_ids + c.token_ids]), len(c.prompt_ids)
        assert [s.start for s in c.versions] == [0, *(s.end for s in c.versions[:-1])]
        assert c.versions[-1].end == len(c.token_ids) == len(c.logprobs)
        worst = 0.0
        for span in c.versions:
            with torch.no_grad():
                logits = self.model(span.version)(ids).logits[0, n - 1 : -1].double()
            want = torch.log_softmax(logits / (c.sampling.temperature or 1.0), -1)
            want = want.gather(1, ids[0, n:, None])[span.start : span.end, 0]
            got = torch.tensor(c.logprobs[span.start : span.end], dtype=torch.float64)
            worst = max(worst, (want - got).abs().max().item())
        return worst

    def commit_on(self, engine: str, staged: Staged, fault: str) -> Any:
        replica = next(r for r in self.fleet.replicas if r.name == engine)

        async def commit() -> bytes:
            return await replica.call_one("commit", encode(staged), 30.0, fault, deadline_s=60)

        return decode_report(self.run(commit()))


def _sharpened(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    file = str(folder / "model.safetensors")
    save_file({n: t * (1 if "norm" in n else 4) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder
