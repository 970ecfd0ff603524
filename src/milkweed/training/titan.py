"""The only module that touches TorchTitan's inside: seams for a CPU, a model from an `Architecture`, its parallel form.

Read from TorchTitan 0.3.0 (`VERSION`). On a machine with an accelerator the CPU seams do nothing.
Every family is built from the Qwen3 decoder with rotate-half rotary embeddings, so that each parameter has exactly the
layout of its Hugging Face weight (TorchTitan's Llama permutes q and k; here nothing needs a permutation, and a rank's
shard is a plain slice of the Hugging Face tensor).
"""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from milkweed.errors import ConfigError
from milkweed.training.attention import DocumentMask, document_attention
from milkweed.training.config import TrainerConfig
from milkweed.training.model import Architecture
from milkweed.types import Batch

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

VERSION = "0.3.0"
_ready = False


def device() -> torch.device:
    """This rank's device: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def prepare() -> None:
    """Import TorchTitan, once, with its device chosen. Must come before any other import of it."""
    global _ready
    if _ready:
        return
    import torch._utils as torch_utils

    logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    if not torch.cuda.is_available():
        # torchtitan.tools.utils takes the device type at import and falls back to "cuda" where no accelerator answers
        saved = torch_utils._get_available_device_type
        torch_utils._get_available_device_type = lambda: "cpu"
        try:
            import torchtitan.tools.utils  # noqa: F401
        finally:
            torch_utils._get_available_device_type = saved
    import torchtitan.tools.utils  # noqa: F401

    _ready = True


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
        dist.init_process_group(backend, timeout=timeout)
    return dist.get_world_size()


@functools.cache
def _classes() -> SimpleNamespace:
    """Subclasses of TorchTitan's modules, made after `prepare`."""
    prepare()
    import torch.nn.functional as F
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    class DocumentAttention(FlexAttention):
        """SDPA that keeps packed sequences apart. FlexAttention has no backward pass on a CPU."""

        @dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):
            pass

        def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_):
            return document_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, enable_gqa)

    class LlamaRotaryHalf(CosSinRoPE):
        """Rotate-half embeddings with Llama 3.1's stretched frequencies, which CosSinRoPE refuses."""

        @dataclass(kw_only=True, slots=True)
        class Config(CosSinRoPE.Config):
            pass

        def _precompute_cache(self) -> torch.Tensor:
            c = self.config
            freqs = 1.0 / (c.theta ** (torch.arange(0, c.dim, 2).float() / c.dim))
            wavelength = 2 * math.pi / freqs
            low = c.original_max_position_embeddings / c.low_freq_factor
            high = c.original_max_position_embeddings / c.high_freq_factor
            smooth = (c.original_max_position_embeddings / wavelength - c.low_freq_factor) / (
                c.high_freq_factor - c.low_freq_factor
            )
            between = (1 - smooth) * freqs / c.scaling_factor + smooth * freqs
            freqs = torch.where(wavelength > low, freqs / c.scaling_factor, torch.where(wavelength < high, freqs, between))
            angles = torch.outer(torch.arange(c.max_seq_len).float(), freqs)
            angles = torch.cat([angles, angles], dim=-1)
            return torch.cat([angles.cos(), angles.sin()], dim=-1)

    class Experts(GroupedExperts):
        """Experts that compute in the dtype they are given; TorchTitan's always round to bfloat16."""

        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

        def forward(self, x_RD, num_tokens_per_expert_E):
            w1, w2, w3 = (
                w.to_local() if hasattr(w, "to_local") else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
            )
            out = x_RD.new_zeros(x_RD.shape[0], w2.shape[1])
            start, pieces = 0, []
            for expert, count in enumerate(num_tokens_per_expert_E.tolist()):
                x = x_RD[start : start + int(count)]
                pieces.append((F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())) @ w2[expert].t())
                start += int(count)
            return torch.cat(pieces) if pieces else out

    class Adapter(Qwen3StateDictAdapter):
        """Hugging Face names of every family's weights; Qwen2's biases besides."""

        def __init__(self, model_config, hf_assets_path):
            super().__init__(model_config, hf_assets_path)
            for hf, titan in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv")):
                key = f"model.layers.{{}}.self_attn.{hf}.bias"
                self.from_hf_map[key] = f"layers.{{}}.attention.qkv_linear.{titan}.bias"

    return SimpleNamespace(
        DocumentAttention=DocumentAttention, LlamaRotaryHalf=LlamaRotaryHalf, Experts=Experts, Adapter=Adapter
    )


def model_spec(a: Architecture, seq_len: int) -> Any:
    """TorchTitan's ModelSpec of `a`, with rotary caches for rows of `seq_len`. Nothing is initialised at random: every
    parameter is loaded."""
    prepare()
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init as skip
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.protocols.model_spec import ModelSpec

    own = _classes()
    cpu = not torch.cuda.is_available()
    init = {"weight": skip, "bias": skip}

    def norm(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=a.norm_eps, param_init=init)

    rotary: dict[str, Any] = dict(dim=a.head_dim, max_seq_len=seq_len, theta=a.rope_theta)
    if a.rope is None:
        rope = CosSinRoPE.Config(**rotary)
    else:
        rope = own.LlamaRotaryHalf.Config(
            **rotary,
            scaling="llama",
            scaling_factor=a.rope.factor,
            low_freq_factor=a.rope.low_freq_factor,
            high_freq_factor=a.rope.high_freq_factor,
            original_max_position_embeddings=a.rope.original_max_position_embeddings,
        )

    def layer(index: int) -> Any:
        attention = make.make_gqa_config(
            dim=a.dim,
            n_heads=a.heads,
            n_kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=own.DocumentAttention.Config() if cpu else make.get_attention_config("flex"),
            fuse_qkv=False,  # so that q, k and v shards are plain slices of their Hugging Face weights
            rope=rope,
            qk_norm=norm(a.head_dim) if a.qk_norm else None,
        )
        attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = a.qkv_bias
        block: dict[str, Any] = {}
        if a.experts is not None and index in a.moe_layers:
            e = a.experts
            routed = make.make_routed_experts_config(
                dim=a.dim,
                hidden_dim=e.hidden,
                num_experts=e.count,
                top_k=e.top_k,
                param_init={"w1_EFD": skip, "w2_EDF": skip, "w3_EFD": skip},
                comm_backend="standard",
            )
            if cpu:
                routed.inner_experts = own.Experts.Config(
                    dim=a.dim, hidden_dim=e.hidden, num_experts=e.count, param_init=routed.inner_experts.param_init
                )
            block["moe"] = make.make_moe_config(
                num_experts=e.count,
                router=make.make_router_config(
                    dim=a.dim,
                    num_experts=e.count,
                    gate_param_init=init,
                    top_k=e.top_k,
                    score_func="softmax",
                    route_norm=e.normalise,
                ),
                routed_experts=routed,
                # the loss-free balancing bias is no Hugging Face weight: the engine would route differently
                load_balance_coeff=None,
            )
        else:
            block["feed_forward"] = make.make_ffn_config(
                dim=a.dim, hidden_dim=a.hidden, w1_param_init=init, w2w3_param_init=init
            )
        return Qwen3TransformerBlock.Config(
            attention=attention, attention_norm=norm(a.dim), ffn_norm=norm(a.dim), **block
        )

    config = Qwen3Model.Config(
        dim=a.dim,
        vocab_size=a.vocab,
        enable_weight_tying=a.tied,
        tok_embeddings=Embedding.Config(num_embeddings=a.vocab, embedding_dim=a.dim, param_init=init),
        norm=norm(a.dim),
        lm_head=Linear.Config(in_features=a.dim, out_features=a.vocab, param_init=init),
        layers=[layer(i) for i in range(a.layers)],
    )
    return ModelSpec(
        name=a.family,
        flavor="custom",
        model=config,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=own.Adapter,
    )


@dataclass
class Parallel:
    """A built model with the meshes it lies on. `batch_rank`/`batch_size`: which share of the rows is this rank's."""

    model: torch.nn.Module
    dims: ParallelDims
    adapter: Any
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
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.distributed.activation_checkpoint import FullAC

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
    runtime = SimpleNamespace(
        training=training, parallelism=parallelism, debug=DebugConfig(), compile=CompileConfig(enable=False)
    )
    spec.model.update_from_config(config=runtime)
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
    adapter = spec.state_dict_adapter(spec.model, None)
    return Parallel(model, dims, adapter, context, b, bs, c, cs, t, ts)


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


def load_hf(parallel: Parallel, folder: str) -> None:
    """Fill the model's parameters from `folder`'s safetensors; each rank reads its own slices."""
    import torch.distributed.checkpoint as dcp

    with torch.no_grad():
        wanted = parallel.adapter.to_hf(parallel.model.state_dict())
        dcp.load(wanted, storage_reader=parallel.adapter.get_hf_storage_reader(folder))
        parallel.model.load_state_dict(parallel.adapter.from_hf(wanted), strict=False)


def hf_names(parallel: Parallel) -> dict[str, torch.nn.Parameter]:
    """The model's parameters, each once, under its TorchTitan name (wrappers' prefixes removed)."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    return {canonical_fqn(name): p for name, p in parallel.model.named_parameters()}


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
    """TorchTitan's CheckpointManager over `folder`/checkpoints, saving whenever asked."""
    from torchtitan.components.checkpointer import CheckpointManager

    return CheckpointManager.Config(
        enable=True, folder="checkpoints", interval=1, keep_latest_k=keep, last_save_model_only=False
    ).build(
        dataloader=None,
        model_parts=[parallel.model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": state},
        sd_adapter=parallel.adapter,
        base_folder=folder,
    )
