"""A TorchTitan model from an `Architecture`: its import on a CPU, its modules, its configuration.

Read from TorchTitan `VERSION`. Every family is built from the Qwen3 decoder with rotate-half rotary embeddings, so that each
parameter has exactly the layout of its Hugging Face weight (TorchTitan's own Llama permutes q and k; here nothing needs a
permutation, and a rank's shard is a plain slice of the Hugging Face tensor).
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from milkweed.errors import ConfigError
from milkweed.training.attention import document_attention
from milkweed.training.model import VALUE_HEAD, Architecture

VERSION = "0.3.0"
_ready = False

_ATTENTION = "layers.{}.attention"
_EXPERTS = "layers.{}.moe.routed_experts.inner_experts"
HF_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    VALUE_HEAD: VALUE_HEAD,  # `titan.parameters` calls it so
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    f"{_ATTENTION}.qkv_linear.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    f"{_ATTENTION}.qkv_linear.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    f"{_ATTENTION}.qkv_linear.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    f"{_ATTENTION}.qkv_linear.wq.bias": "model.layers.{}.self_attn.q_proj.bias",
    f"{_ATTENTION}.qkv_linear.wk.bias": "model.layers.{}.self_attn.k_proj.bias",
    f"{_ATTENTION}.qkv_linear.wv.bias": "model.layers.{}.self_attn.v_proj.bias",
    f"{_ATTENTION}.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    f"{_ATTENTION}.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    f"{_ATTENTION}.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.moe.router.gate.weight": "model.layers.{}.mlp.gate.weight",
    # one stacked parameter holds all experts; the second number is the expert's
    f"{_EXPERTS}.w1_EFD": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    f"{_EXPERTS}.w3_EFD": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    f"{_EXPERTS}.w2_EDF": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}
"""TorchTitan's parameters and their Hugging Face weights; `{}` is the layer, then the expert."""


def prepare() -> None:
    """Import TorchTitan, once, with its device chosen. Must come before any other import of it.

    Raises ConfigError where another version is installed than the one this was written for.
    """
    global _ready
    if _ready:
        return
    found = metadata.version("torchtitan")
    if found.split("+")[0] != VERSION:
        raise ConfigError(f"torchtitan {found} is installed; milkweed needs {VERSION}: pip install torchtitan=={VERSION}")
    import torch._utils as torch_utils

    # advice that is not ours to follow: how DTensor reduces over two mesh axes, what a router asks of autocast
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
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


@functools.cache
def _classes() -> SimpleNamespace:
    """Subclasses of TorchTitan's modules, made after `prepare`."""
    prepare()
    import torch.nn.functional as F
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts

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

    return SimpleNamespace(DocumentAttention=DocumentAttention, LlamaRotaryHalf=LlamaRotaryHalf, Experts=Experts)


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
        lm_head=Linear.Config(in_features=a.dim, out_features=1 if a.head == "value" else a.vocab, param_init=init),
        layers=[layer(i) for i in range(a.layers)],
    )
    return ModelSpec(
        name=a.family,
        flavor="custom",
        model=config,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,  # its mixture-of-experts part fails on HSDP and TP; `shards` does this work
    )


def value_head_sharding() -> Any:
    """A value head's one row is not cut under tensor parallelism: every rank computes every value."""
    prepare()
    import spmd_types as spmd
    from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
    from torchtitan.protocols.sharding import ShardingConfig

    whole = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": whole},
        in_dst_shardings={"input": whole},
        out_src_shardings=whole,
        out_dst_shardings=whole,
    )
