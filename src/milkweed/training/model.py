"""From a Hugging Face model folder to what the trainer must know of it: sizes, family, and which weights lie where.

Reads JSON and safetensors headers only; imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal

import msgspec

from milkweed.errors import ConfigError, DataError

FAMILIES = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3 MoE", "llama": "Llama", "qwen2": "Qwen2"}
_INDEX = "model.safetensors.index.json"
Head = Literal["policy", "value"]
VALUE_HEAD = "score.weight"
"""A value head's weight `[1, dim]` in a folder, by the name that transformers' models for sequence classification use."""


class LlamaRope(msgspec.Struct, frozen=True):
    """Llama 3.1's stretching of the rotary frequencies (`rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Experts(msgspec.Struct, frozen=True):
    """A mixture's sizes: `count` experts of width `hidden`, `top_k` of them for each token."""

    count: int
    top_k: int
    hidden: int
    normalise: bool


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder, in the names of the field. `moe_layers` lists the layers that hold experts. `head` is what stands on
    it: the "policy"'s over the vocabulary, or the one number of a "value" head, whose weight is `VALUE_HEAD`."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
    head: Head = "policy"
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    rope: LlamaRope | None = None
    experts: Experts | None = None
    moe_layers: tuple[int, ...] = ()

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model by its Hugging Face name, with its shape. A tied head has no entry."""
        d, h, kv = self.dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, d), "model.norm.weight": (d,)}
        if self.head == "value":
            out[VALUE_HEAD] = (1, d)
        elif not self.tied:
            out["lm_head.weight"] = (self.vocab, d)
        for i in range(self.layers):
            at = f"model.layers.{i}"
            out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (d,)
            for name, rows in (("q_proj", h), ("k_proj", kv), ("v_proj", kv)):
                out[f"{at}.self_attn.{name}.weight"] = (rows, d)
                if self.qkv_bias:
                    out[f"{at}.self_attn.{name}.bias"] = (rows,)
            out[f"{at}.self_attn.o_proj.weight"] = (d, h)
            if self.qk_norm:
                out[f"{at}.self_attn.q_norm.weight"] = out[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
            if self.experts is not None and i in self.moe_layers:
                out[f"{at}.mlp.gate.weight"] = (self.experts.count, d)
                blocks = [(f"{at}.mlp.experts.{e}", self.experts.hidden) for e in range(self.experts.count)]
            else:
                blocks = [(f"{at}.mlp", self.hidden)]
            for block, width in blocks:
                out[f"{block}.gate_proj.weight"] = out[f"{block}.up_proj.weight"] = (width, d)
                out[f"{block}.down_proj.weight"] = (d, width)
        return out


class WeightInfo(msgspec.Struct, frozen=True):
    """Where one weight of a folder lies and what it is."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path.parent}: no {path.name}; a model folder holds config.json and *.safetensors") from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error


def read_architecture(folder: str | Path, head: Head = "policy") -> Architecture:
    """The architecture that `folder/config.json` describes, with `head` on it.

    Raises DataError where the file is missing or broken, ConfigError naming the key where the trainer has no such model.
    """
    if head not in ("policy", "value"):
        raise ConfigError(f"head must be 'policy' or 'value', not {head!r}")
    path = Path(folder) / "config.json"
    raw = _json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} cannot be trained; known are {', '.join(sorted(FAMILIES))}")

    def need(key: str, *others: str) -> Any:
        for name in (key, *others):
            if raw.get(name) is not None:
                return raw[name]
        raise DataError(f"{path}: key {key!r} is missing")

    def refuse(key: str, allowed: Any) -> None:
        if raw.get(key) not in (None, allowed):
            raise ConfigError(f"{path}: {key} = {raw[key]!r} is not supported by the trainer (only {allowed!r})")

    refuse("hidden_act", "silu")
    refuse("mlp_bias", False)
    refuse("use_sliding_window", False)
    refuse("quantization_config", None)
    if family != "qwen2":
        refuse("attention_bias", False)

    rope = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta")}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ConfigError(f"{path}: rope_type {kind!r} is not supported by the trainer (only 'default' and 'llama3')")
    dim, heads = int(need("hidden_size")), int(need("num_attention_heads"))
    layers = int(need("num_hidden_layers"))
    experts, moe_layers = None, ()
    if family == "qwen3_moe":
        experts = Experts(
            count=int(need("num_local_experts", "num_experts")),
            top_k=int(need("num_experts_per_tok")),
            hidden=int(need("moe_intermediate_size")),
            normalise=bool(raw.get("norm_topk_prob", False)),
        )
        dense, every = set(raw.get("mlp_only_layers") or ()), int(raw.get("decoder_sparse_step") or 1)
        moe_layers = tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)
    return Architecture(
        family=family,
        head=head,
        vocab=int(need("vocab_size")),
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or dim // heads),
        hidden=int(need("intermediate_size")),
        norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        max_positions=int(need("max_position_embeddings")),
        tied=head == "policy" and bool(raw.get("tie_word_embeddings", False)),
        rope=None
        if kind == "default"
        else LlamaRope(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        ),
        experts=experts,
        moe_layers=moe_layers,
    )


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file. Raises DataError where the file is short or not one."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= size <= 100_000_000:
                raise DataError(f"{path}: not a safetensors file (cut short, or a Git LFS pointer)")
            header = json.loads(file.read(size))
    except FileNotFoundError:
        raise DataError(f"{path}: named by {_INDEX} but missing") from None
    except ValueError as error:
        raise DataError(f"{path}: not a safetensors file: {error}") from error
    end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
    if path.stat().st_size != 8 + size + end:
        raise DataError(f"{path}: {path.stat().st_size} bytes, but its header promises {8 + size + end}; copy it again")
    return header


def weight_files(folder: str | Path) -> dict[str, WeightInfo]:
    """Every weight in the folder's safetensors files, read from their headers. Raises DataError naming the file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such model folder")
    index = folder / _INDEX
    names = sorted(set(_json(index)["weight_map"].values())) if index.exists() else []
    files = [folder / n for n in names] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no *.safetensors: a model folder without weights cannot be trained")
    out = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                out[name] = WeightInfo(file.name, entry["dtype"], tuple(entry["shape"]))
    return out


def has_value_head(folder: str | Path) -> bool:
    """Whether the folder is a critic or reward model: it holds a value head."""
    return VALUE_HEAD in weight_files(folder)


def check_weights(folder: str | Path, architecture: Architecture) -> None:
    """Refuse a folder whose weights are not those that its config.json promises. Raises DataError naming one. Only a
    value head may be missing: one made from a policy's folder begins at zero."""
    found = weight_files(folder)
    if architecture.head == "policy" and VALUE_HEAD in found:
        raise DataError(f"{folder}: holds a value head ({VALUE_HEAD}), so it is a critic or reward model and no policy")
    for name, shape in architecture.weights().items():
        if name == VALUE_HEAD and name not in found:
            continue
        if name not in found:
            raise DataError(f"{folder}: weight {name!r} is missing though config.json asks for it")
        if found[name].shape != shape:
            raise DataError(
                f"{Path(folder) / found[name].file}: weight {name!r} has shape {list(found[name].shape)}, "
                f"but config.json makes it {list(shape)}"
            )
