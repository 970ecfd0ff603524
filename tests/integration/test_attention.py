"""The batched attention backend of tools/sglang-cpu gives what SGLang's own torch_native gives: numbers and tokens."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from milkweed.models import new_qwen3

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def backends():
    """The two backend classes, imported as an engine's process does."""
    before = os.environ.get("SGLANG_USE_CPU_ENGINE")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang_cpu.attention import BatchedAttention
    finally:
        if before is None:
            del os.environ["SGLANG_USE_CPU_ENGINE"]
    return TorchNativeAttnBackend, BatchedAttention


class Pool:
    """KV of one layer: [tokens, kv heads, head size]."""

    def __init__(self, key, value) -> None:
        self.key, self.value = key, value

    def get_key_buffer(self, layer):
        return self.key

    def get_value_buffer(self, layer):
        return self.value


def outputs(backends, mode: str, prefixes: list[int], new: list[int], kv_heads=2, share=3, size=64, **layer_changes):
    """Both backends' output for the same random queries and KV; the batched one's number of groups."""
    import torch
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows, lengths = len(prefixes), [p + n for p, n in zip(prefixes, new, strict=True)]
    draw = torch.Generator().manual_seed(sum(lengths))
    pool = Pool(*torch.randn(2, sum(lengths) + 1, kv_heads, size, generator=draw))
    places = torch.randperm(sum(lengths), generator=draw) + 1
    table = torch.zeros(rows + 3, max(lengths) + 1, dtype=torch.int32)
    request_rows = torch.randperm(rows + 3, generator=draw)[:rows]
    for row, part in zip(request_rows.tolist(), places.split(lengths), strict=True):
        table[row, : len(part)] = part.int()
    runner = SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )
    layer = SimpleNamespace(
        attn_type=AttentionType.DECODER,
        is_cross_attention=False,
        sliding_window_size=-1,
        tp_q_head_num=kv_heads * share,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        qk_head_dim=size,
        v_head_dim=size,
        scaling=size**-0.5,
        layer_id=0,
    )
    vars(layer).update(layer_changes)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if mode == "decode" else ForwardMode.EXTEND,
        encoder_lens=None,
        spec_info=None,
        out_cache_loc=None,
        req_pool_indices=request_rows,
        seq_lens=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
    )
    queries = torch.randn(rows if mode == "decode" else sum(new), kv_heads * share * size, generator=draw)
    both, made = [], []
    for backend in backends:
        made.append(backend(runner))
        made[-1].init_forward_metadata(batch)
        both.append(getattr(made[-1], f"forward_{mode}")(queries, None, None, layer, batch, False))
    return both[0], both[1], made[1]._groups


@pytest.mark.parametrize(("kv_heads", "share", "size"), [(2, 3, 64), (4, 1, 32), (1, 4, 48)])
def test_it_computes_what_torch_native_does_for_any_mixture_of_lengths(backends, kv_heads, share, size):
    import torch

    draw = random.Random(size)
    for rows in (1, 2, 7, 40):
        prefixes = [draw.choice([0, 0, 1, 40, draw.randint(0, 500)]) for _ in range(rows)]
        new = [draw.choice([1, 1, 2, draw.randint(1, 200)]) for _ in range(rows)]
        for mode, counts in (("decode", [1] * rows), ("extend", new)):
            want, got, groups = outputs(backends, mode, prefixes, counts, kv_heads, share, size)
            assert groups, "it fell back"
            torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-4)


def test_no_mask_grows_with_queries_times_keys(backends):
    import torch

    want, got, groups = outputs(backends, "extend", [3000, 2900], [600, 650])
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-4)
    masks = [
        keys.mask.numel() for group in groups for keys in (group.prefix, group.new) if keys and keys.mask is not None
    ]
    assert sum(masks) <= 3000 + 2900 + 100


def test_a_sliding_window_layer_is_left_to_torch_native(backends):
    import torch

    want, got, _ = outputs(backends, "decode", [50, 80], [1, 1], sliding_window_size=16)
    assert torch.equal(want, got)


def test_engines_with_either_backend_decode_the_same_greedy_tokens(tmp_path, monkeypatch):
    from sglang_cpu import environment

    monkeypatch.syspath_prepend(ROOT / "tools")  # the engines' processes get this path too
    bench = importlib.import_module("bench_attention")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    model = new_qwen3(tmp_path / "model", hidden=64, layers=2, head_dim=16, intermediate=128, seed=3)
    draw = random.Random(5)
    common = [draw.randrange(3, 60) for _ in range(90)]
    # alone; a batch of very different lengths; the same prompts again, over the cached prefixes, and longer
    ragged = [[draw.randrange(3, 60) for _ in range(draw.choice([2, 9, 40, 150]))] for _ in range(20)]
    batches = [ragged[:1], ragged, [common[:n] for n in (90, 90, 60, 30)], [common[:n] + [5, 9] for n in (90, 88, 3)]]
    engines = []
    try:
        for backend in bench.BACKENDS:
            engines.append(bench.Served(str(model), backend))
        tokens = []
        for engine in engines:
            engine.receive(bench.START_S)
            tokens.append([engine.run(prompts, 0.0, new=24)[0] for prompts in batches])
    finally:
        for engine in engines:
            engine.stop()
    assert tokens[0] == tokens[1]
