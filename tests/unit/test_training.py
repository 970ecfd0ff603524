"""The trainer's pure parts: configuration, model folders, how a batch is cut, masks, log-probs, shipped functions."""

from __future__ import annotations

import functools
import json
import struct

import pytest
import torch

from milkweed.errors import ConfigError, DataError
from milkweed.training import batching
from milkweed.training.attention import DocumentMask, document_attention
from milkweed.training.config import TrainerConfig
from milkweed.training.model import check_weights, read_architecture, weight_files
from milkweed.training.policy import Policy
from milkweed.training.shipping import ship, unship
from milkweed.types import Batch

CONFIG = dict(
    model_type="qwen3", vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
)  # fmt: skip


def batch_of(*rows: list[int], seq: int) -> Batch:
    """Rows given by the lengths of their sequences."""
    tokens = torch.arange(len(rows) * seq).view(len(rows), seq) % 29 + 1
    positions, segments = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    number = 0
    for r, lengths in enumerate(rows):
        at = 0
        for n in lengths:
            positions[r, at : at + n] = torch.arange(n)
            segments[r, at : at + n] = number
            number, at = number + 1, at + n
    mask = positions > 0
    zero = torch.zeros(tokens.shape)
    return Batch(tokens * (segments >= 0), positions, segments, mask, mask.float(), zero, zero.clone(), extra={"old": zero + 1})


def policy(logits: torch.Tensor, batch: Batch) -> Policy:
    return Policy(logits, batch, cp_group=None, tp_group=None, cp_slice=slice(None))


def write_folder(folder, config=CONFIG, drop=(), **shapes) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in read_architecture(folder).weights().items():
        if name in drop:
            continue
        shape = shapes.get(name, shape)
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def test_the_learning_rate_warms_up_and_decays():
    config = TrainerConfig(lr=1.0, warmup_steps=4, decay="linear", total_steps=14, min_lr=0.5)
    assert [config.lr_at(s) for s in (0, 3, 4, 9, 14, 99)] == [0.25, 1.0, 1.0, 0.75, 0.5, 0.5]
    assert config.lr_at(4, peak=2.0) == 2.0
    assert TrainerConfig(lr=0.0).lr_at(7) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": float("nan")}, {"micro_rows": 0}, {"tensor_parallel": 0}, {"decay": "cosine", "warmup_steps": 3, "total_steps": 2}, {"keep_checkpoints": 1}],
)
def test_values_that_cannot_be_meant_are_refused_by_key(wrong):
    with pytest.raises(ConfigError, match=r"trainer\.\w+"):
        TrainerConfig(**wrong)


def test_a_model_folder_is_checked_before_anything_is_built(tmp_path):
    with pytest.raises(DataError, match="config.json"):
        read_architecture(tmp_path)
    write_folder(tmp_path)
    check_weights(tmp_path, read_architecture(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(DataError, match="promises"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match="LFS"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match="without weights"):
        weight_files(tmp_path)
    write_folder(tmp_path, drop=["model.norm.weight"])
    with pytest.raises(DataError, match="model.norm.weight"):
        check_weights(tmp_path, read_architecture(tmp_path))
    write_folder(tmp_path, **{"model.norm.weight": (9,)})
    with pytest.raises(DataError, match=r"\[9\].*\[8\]"):
        check_weights(tmp_path, read_architecture(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused_by_key(change, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=named):
        read_architecture(tmp_path)


def test_every_rank_gets_as_many_micro_batches_and_every_row_is_computed_once():
    batch = batch_of([5], [7, 2], [3], [4], [6], seq=12)
    seen, shapes = [], []
    for rank in range(2):
        cut = list(batching.micro_batches(batch, rank=rank, ranks=2, micro_rows=2, multiple=4))
        shapes.append([m.rows for _, m in cut])
        for index, micro in cut:
            seen += index
            assert micro.tokens.shape[1] % 4 == 0
            for i, row in enumerate(index):
                width = micro.tokens.shape[1]
                assert torch.equal(micro.tokens[i], batch.tokens[row, :width])
                assert torch.equal(micro.extra["old"][i], batch.extra["old"][row, :width])
            assert (micro.segments[len(index) :] == -1).all() and not micro.mask[len(index) :].any()
    assert sorted(seen) == [0, 1, 2, 3, 4] and shapes[0] == shapes[1]


def test_a_row_longer_than_allowed_or_an_unknown_token_is_refused_by_row():
    with pytest.raises(DataError, match="row 1 holds 9 tokens"):
        batching.check(batch_of([5], [9], seq=12), seq_len=8, vocab=40)
    with pytest.raises(DataError, match="token id"):
        batching.check(batch_of([5], seq=12), seq_len=12, vocab=4)
    wrong = batch_of([5], seq=12)
    wrong.mask[0, 0] = True
    with pytest.raises(DataError, match="row 0, token 0"):
        batching.check(wrong, seq_len=12, vocab=40)


@pytest.mark.parametrize("rows", [([4, 3, 5, 2], [6, 6, 2]), ([15], [1, 14])])
def test_packed_sequences_do_not_see_each_other_either_way(rows):
    batch = batch_of(*rows, seq=16)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 16, h, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    fast, dense = DocumentMask(batch.segments), DocumentMask(batch.segments, slice(0, 16))
    real = (batch.segments >= 0)[..., None, None]
    results = []
    for mask in (fast, dense):
        out = document_attention(q, k, v, mask, None, True) * real
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-5)
    for segment in range(int(batch.segments.max()) + 1):
        at = (batch.segments == segment).nonzero(as_tuple=True)
        parts = (x[at].transpose(0, 1)[None] for x in (q, k, v))
        alone = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        assert torch.allclose(results[0][0][at], alone[0].transpose(0, 1), atol=1e-5)


def test_many_short_sequences_are_gathered_and_one_long_row_is_not():
    assert DocumentMask(batch_of([8] * 32, seq=256).segments).gather is not None
    assert DocumentMask(batch_of([250], seq=256).segments).gather is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_outputs_are_aligned_with_tokens_and_gradients_are_exact(temperature):
    batch = batch_of([4, 3], [6], seq=8)
    batch.temperature = temperature
    logits = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = policy(logits, batch)
    logp = torch.log_softmax(logits / temperature, -1)
    shifted = torch.roll(logp, 1, dims=1)
    first = (batch.positions == 0) | (batch.segments < 0)
    expected = shifted.gather(2, batch.tokens[..., None]).squeeze(2).masked_fill(first, 0)
    entropy = (-(shifted.exp() * shifted).sum(-1)).masked_fill(first, 0)
    assert torch.allclose(out.logprobs, expected, atol=1e-6) and torch.allclose(out.entropy(), entropy, atol=1e-5)
    assert torch.equal(out.logprobs[first], torch.zeros(int(first.sum())))
    kept = torch.roll(logits / temperature, 1, dims=1).masked_fill(first[..., None], 0)
    assert torch.allclose(out.logits(), kept)
    weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    for ours, theirs in ((out.logprobs, expected), (out.entropy(), entropy)):
        a = torch.autograd.grad((ours * weight).sum(), logits, retain_graph=True)[0]
        b = torch.autograd.grad((theirs * weight).sum(), logits, retain_graph=True)[0]
        assert torch.allclose(a, b, atol=1e-6)


def test_a_function_from_a_cell_travels_by_value_with_its_source():
    space: dict = {"__name__": "__main__"}
    exec("scale = 3\ndef loss(batch, policy):\n    return batch * scale", space)
    assert unship(ship(space["loss"]).payload)(2, None) == 6
    space["scale"] = 4
    assert unship(ship(space["loss"]).payload)(2, None) == 8

    def here(batch, policy, *, factor):
        return batch * factor

    shipped = ship(functools.partial(here, factor=5))
    assert "return batch * factor" in shipped.source and len(shipped.sha256) == 64
    assert unship(shipped.payload)(2, None) == 10


def test_a_function_that_cannot_be_sent_is_refused_by_name():
    import threading

    lock = threading.Lock()

    def guarded(batch, policy):
        with lock:
            return policy.logprobs

    with pytest.raises(ConfigError, match="guarded"):
        ship(guarded)
