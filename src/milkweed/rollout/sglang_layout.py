"""How SGLang lays a model out: traced in a live scheduler, or in a process that has no engine, no weights and no group.

Read from SGLang 0.5.23. Without an engine the model is built on the meta device, once for each tensor-parallel rank,
in a process group of torch's that only pretends to have the other ranks. `python -m milkweed.rollout.sglang_layout
FOLDER DEGREE DTYPE` writes the EngineLayout as MessagePack to stdout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from milkweed.errors import TransferError
from milkweed.transfer.plan import EngineLayout, RankLayout


def engine_layout(
    folder: str | Path, tensor_parallel: int, dtype: str = "float32", *, tensors: dict[str, tuple[int, ...]] | None = None,
    deadline_s: float = 300.0,
) -> EngineLayout:  # fmt: skip
    """The layout of an engine of `tensor_parallel` ranks on the model of `folder` (only its config.json is read when
    `tensors` gives the Hugging Face names and shapes), made in a process of its own. Raises TransferError."""
    from milkweed.rollout.sglang_engine import engine_environment

    command = [sys.executable, "-m", "milkweed.rollout.sglang_layout", str(folder), str(tensor_parallel), dtype]
    env = os.environ | engine_environment(cpu=True) | {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
    given = msgspec.json.encode(tensors or {})
    try:
        done = subprocess.run(command, input=given, capture_output=True, env=env, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TransferError(f"the engine's layout of {folder} was not made within {deadline_s:g} s") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TransferError(f"the engine's layout of {folder} with {tensor_parallel} ranks: {''.join(last)}")
    return msgspec.msgpack.decode(done.stdout, type=EngineLayout)


def live_layout(scheduler: Any, tensors: dict[str, tuple[int, ...]]) -> tuple[RankLayout, dict[str, Any]]:
    """The layout of this scheduler's own rank, and its parameters by name. Nothing of the engine changes."""
    runners = scheduler.weight_updater._select_runners()
    if len(runners) != 1:
        raise TransferError("an engine with a draft model has two sets of parameters")
    return traced(runners[0][1].weight_updater.get_model(), tensors)


def traced(model: Any, tensors: dict[str, tuple[int, ...]]) -> tuple[RankLayout, dict[str, Any]]:
    from milkweed.transfer.tracing import trace

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            raise TransferError(f"{name} is quantised ({type(method).__name__}): its parameters are not plain copies")
    return trace(model.load_weights, model.named_parameters(remove_duplicate=False), tensors)


def build(folder: str, degree: int, dtype: str, tensors: dict[str, tuple[int, ...]]) -> EngineLayout:
    """All ranks, one after another, in this process."""
    import torch

    from milkweed.rollout.checks import folder_tensors
    from milkweed.rollout.sglang_engine import _without_compiler

    tensors = tensors or folder_tensors(folder)
    ranks = []
    with _without_compiler(True):
        for rank in range(degree):
            with _pretended(folder, rank, degree, dtype) as (config, loader):
                with loader.set_default_torch_dtype(getattr(torch, dtype)), torch.device("meta"):
                    model = loader._initialize_model(config, loader.LoadConfig())
                ranks.append(traced(model, tensors)[0])
    return EngineLayout(tensors, ranks)


@contextmanager
def _pretended(folder: str, rank: int, degree: int, dtype: str) -> Iterator[tuple[Any, Any]]:
    """SGLang's world as rank `rank` of `degree` sees it, with nobody else there."""
    import torch.distributed as dist
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.weight_cache.daemon import SpawnRanks
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from milkweed.rollout.sglang_engine import engine_arguments

    arguments = engine_arguments(folder, cpu=True, dtype=dtype, tensor_parallel=degree)
    arguments["attention_backend"] = "torch_native"  # the plugin's own backend needs no place in the layout
    server = ServerArgs(**arguments, disable_custom_all_reduce=True)
    world = runtime_context.spawn_world_rank(server, tp_rank=rank, pp_rank=0)
    # the role of SGLang's own process that loads a model without serving it
    runtime_context.publish(server, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=world, gpu_id=rank))
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    try:
        initialize_moe_config()
        dist.init_process_group("fake", rank=rank, world_size=degree, store=FakeStore())
        parallel_state.init_distributed_environment(
            world_size=degree, rank=rank, distributed_init_method="fake", local_rank=rank, backend="fake"
        )
        parallel_state.set_custom_all_reduce(False)
        parallel_state.initialize_model_parallel(backend="fake")
        initialize_dp_attention(server)
        config = ModelConfig.from_server_args(server)
        init_dp_gathered_buffer(config)
        # on a CPU it pads what does not divide
        config = adjust_config_with_unaligned_cpu_tp(config, loader.LoadConfig(), degree)
        yield config, loader
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        dist.new_group = new_group
        runtime_context.reset_context()


def main() -> None:
    folder, degree, dtype = sys.argv[1:4]
    tensors = msgspec.json.decode(sys.stdin.buffer.read() or b"{}", type=dict[str, tuple[int, ...]])
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answer
    raw = msgspec.msgpack.encode(build(folder, int(degree), dtype, tensors))
    with os.fdopen(out, "wb") as file:
        file.write(raw)


if __name__ == "__main__":
    main()
