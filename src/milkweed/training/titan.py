"""TorchTitan's inside, with `titan_model` the only module that touches it: seams for a CPU, meshes, optimiser, checkpoints.

Read from TorchTitan 0.3.0 (`titan_model.VERSION`). On a machine with an accelerator the CPU seams do nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from milkweed.errors import ConfigError
from milkweed.fleet.loopback import keep_stores
from milkweed.training.attention import DocumentMask
from milkweed.training.config import TrainerConfig
from milkweed.training.model import VALUE_HEAD, Architecture
from milkweed.training.titan_model import model_spec, prepare, value_head_sharding
from milkweed.types import Batch

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims


def device() -> torch.device:
    """This rank's device: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def init_process_group(timeout_s: float) -> int:
    """Join the trainer's process group (from the usual environment; alone where there is none). Returns its size."""
    torch.autograd.set_multithreading_enabled(False)
    if dist.is_initialized():
        return dist.get_world_size()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    timeout = timedelta(seconds=timeout_s)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        keep_stores()
        dist.init_process_group(backend, timeout=timeout)
    return dist.get_world_size()


@dataclass
class Parallel:
    """A built model with the meshes it lies on. `batch_rank`/`batch_size`: which share of the rows is this rank's."""

    model: torch.nn.Module
    dims: ParallelDims
    context: Any
    batch_rank: int
    batch_size: int
    cp_rank: int
    cp_size: int
    tp_rank: int
    tp_size: int

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along `axis` ("batch", "cp", "tp"), or None where it has one rank."""
        mesh = self.dims.get_optional_mesh(axis)
        return mesh.get_group() if mesh is not None else None


def build(architecture: Architecture, config: TrainerConfig, folder: str) -> Parallel:
    """The model of `architecture`, cut over the ranks as `config` says, memory allocated, nothing loaded.

    Raises ConfigError where the degrees do not fit the model or the number of processes.
    """
    prepare()
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    world = init_process_group(config.collective_timeout_s)
    if world != config.world_size:
        raise ConfigError(f"trainer: the degrees make {config.world_size} processes, but there are {world}")
    for key, of in (("heads", architecture.heads), ("kv_heads", architecture.kv_heads)):
        if of % config.tensor_parallel:
            raise ConfigError(f"trainer.tensor_parallel = {config.tensor_parallel} does not divide the model's {of} {key}")
    if config.seq_len > architecture.max_positions:
        raise ConfigError(
            f"trainer.seq_len = {config.seq_len} is above the model's max_position_embeddings ({architecture.max_positions})"
        )
    multiple = config.row_multiple
    spec = model_spec(architecture, math.ceil(config.seq_len / multiple) * multiple)
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",  # "spmd_types" needs torch 2.14
        data_parallel_shard_degree=config.data_parallel_shard,
        data_parallel_replicate_degree=config.data_parallel_replicate,
        tensor_parallel_degree=config.tensor_parallel,
        context_parallel_degree=config.context_parallel,
    )
    training = TrainingConfig(seq_len=config.seq_len, mixed_precision_param=config.dtype, disable_cuda_graphs=True)
    dims = ParallelDims.from_config(parallelism, world)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    context = dist_utils.get_spmd_context(parallel_dims=dims)
    dims.build_mesh()
    torch.manual_seed(config.seed)
    # what `update_from_config` would do, without its import of TorchTitan's own training loop and all that that imports
    set_qwen3_sharding_config(spec.model, enable_sp=parallelism.enable_sequence_parallel, enable_ep=False)
    if architecture.head == "value":
        spec.model.lm_head.sharding_config = value_head_sharding()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if config.activation_checkpointing else None,
        dump_folder=folder,
        # one rank in full precision has nothing to gather or cast: the wrapper would only cost its hooks
        skip_dp=world == 1 and config.dtype == "float32",
    )
    _sum_reductions(model)
    model.to_empty(device=device())
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()

    def place(axis: str) -> tuple[int, int]:
        mesh = dims.get_optional_mesh(axis)
        return (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)

    (b, bs), (c, cs), (t, ts) = place("batch"), place("cp"), place("tp")
    return Parallel(model, dims, context, b, bs, c, cs, t, ts)


def attention_inputs(parallel: Parallel, batch: Batch, cut: slice) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(mask, tokens, positions) for one pass over `batch`, of whose rows this rank computes the columns `cut`.

    Padding gets position 0: to TorchTitan's mask each of its tokens is then a sequence of its own.
    """
    positions = torch.where(batch.segments >= 0, batch.positions, 0)
    if not torch.cuda.is_available():
        mask = DocumentMask(batch.segments, cut if parallel.cp_size > 1 else None)
        return mask, batch.tokens[:, cut], positions[:, cut]
    mask = parallel.model.get_attention_masks(positions)
    if parallel.cp_size == 1:
        return mask, batch.tokens, positions
    from torchtitan.distributed.context_parallel import cp_shard

    # no load balancer: it would reorder the row, and the shares are put together again in order
    mesh = parallel.dims.get_mesh("cp")
    (tokens, positions), mask = cp_shard(mesh, (batch.tokens, positions), mask, load_balancer_type=None)
    return mask, tokens, positions


def _sum_reductions(model: torch.nn.Module) -> None:
    """gloo has no PREMUL_SUM, which FSDP uses once its gradient division is off."""
    from torch.distributed.fsdp import FSDPModule

    if not torch.cuda.is_available():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters after a pass without a backward one, so that none outlives the next step."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameters(parallel: Parallel, architecture: Architecture) -> dict[str, torch.nn.Parameter]:
    """The model's parameters, each once, under its TorchTitan name (wrappers' prefixes removed). A value head, which
    stands in the place of the output layer, goes by its own name."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    own = {"lm_head.weight": VALUE_HEAD} if architecture.head == "value" else {}
    names = ((canonical_fqn(name), p) for name, p in parallel.model.named_parameters())
    return {own.get(name, name): p for name, p in names}


def build_optimizer(parallel: Parallel, config: TrainerConfig) -> Any:
    """AdamW over all parameters, without decay on norms and biases, its state allocated at step 0."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    kwargs = dict(lr=config.lr, betas=tuple(config.betas), eps=config.eps)
    groups = [
        ParamGroupConfig(
            pattern=r"(norm\.weight|\.bias)$", optimizer_name="AdamW", optimizer_kwargs={**kwargs, "weight_decay": 0.0}
        ),
        ParamGroupConfig(
            pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={**kwargs, "weight_decay": config.weight_decay}
        ),
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups).build(model_parts=[parallel.model])
    optimizers.state_dict()  # allocates the moments by a step of rate 0 ...
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["step"].zero_()  # ... which would otherwise count as the first one
    return optimizers


def clip_grad_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm` (above 0); their norm before, over all ranks."""
    from torchtitan.distributed.utils import clip_grad_norm_

    return float(clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf, foreach=True))


def checkpointer(parallel: Parallel, optimizers: Any, schedule: Any, state: Any, folder: str, keep: int) -> Any:
    """TorchTitan's CheckpointManager over `folder`/checkpoints, saving whenever asked, by a thread."""
    from torchtitan.components.checkpointer import CheckpointManager

    manager = CheckpointManager.Config(
        enable=True,
        folder="checkpoints",
        interval=1,
        keep_latest_k=keep,
        async_mode="async",
        last_save_model_only=False,
        initial_load_model_only=False,
    ).build(
        dataloader=None,
        model_parts=[parallel.model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    # of step 0 it would load the model alone (private there: `_states_to_load`): no learning rate, no state of ours
    everything = manager._states_to_load
    manager._states_to_load = lambda model_only: everything(False)
    return manager
