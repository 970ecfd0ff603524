"""The CPU distribution for SGLang, without SGLang: batching, the stand-in kernels, KV copies, and when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_cpu import SGLANG, invariant, kv_copies
from sglang_cpu.batching import cut

import sgl_kernel


@given(st.lists(st.integers(1, 2000), max_size=80), st.integers(1, 500), st.integers(1, 20000))
def test_every_row_is_in_one_part_and_no_part_of_several_rows_is_over_budget(lengths, saving, budget):
    parts = cut(lengths, saving=saving, budget=budget)
    assert sorted(r for part in parts for r in part) == list(range(len(lengths)))
    for part in parts:
        assert part == sorted(part)
        assert len(part) == 1 or len(part) * max(lengths[r] for r in part) <= budget


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=80), st.integers(1, 500))
def test_no_further_cut_of_a_part_would_save_enough_padding(lengths, saving):
    for part in cut(lengths, saving=saving, budget=1 << 60):
        inside = sorted((lengths[r] for r in part), reverse=True)
        assert all((inside[0] - inside[n]) * (len(inside) - n) < saving for n in range(len(inside)))


def test_rows_of_about_one_length_stay_one_part_and_a_long_one_gets_its_own():
    assert cut([100, 101, 99, 100], saving=256, budget=1 << 20) == [[0, 1, 2, 3]]
    assert cut([100, 101, 4000, 100], saving=256, budget=1 << 20) == [[2], [0, 1, 3]]
    assert cut([], saving=1, budget=1) == []


def test_new_locations_are_written_into_each_request_row_in_order():
    table = torch.zeros(4, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 5]), torch.tensor([3, 0, 8])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([11, 12, 21, 22, 23]), 8)
    want = torch.zeros(4, 8, dtype=torch.int32)
    want[2, 1:3] = torch.tensor([11, 12])
    want[3, 5:8] = torch.tensor([21, 22, 23])
    assert torch.equal(table, want)


def test_the_seeded_hash_is_murmur3_of_seed_position_and_column():
    def murmur3(data: bytes) -> int:
        state, mask = 0, 0xFFFFFFFF
        for at in range(0, len(data), 4):
            word = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & mask
            word = ((word << 15 | word >> 17) & mask) * 0x1B873593 & mask
            state ^= word
            state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
        state ^= len(data)
        state = (state ^ state >> 16) * 0x85EBCA6B & mask
        state = (state ^ state >> 13) * 0xC2B2AE35 & mask
        return state ^ state >> 16

    assert murmur3(b"test") == 0xBA6BD213  # a published value
    seeds, positions, columns = [7, 2**40 + 5], [0, 31], [0, 1, 2047]
    got = torch.ops.sgl_kernel.murmur_hash32_cpu(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for r in range(2):
        for c in range(3):
            key = seeds[r].to_bytes(8, "little") + positions[r].to_bytes(4, "little") + columns[c].to_bytes(4, "little")
            assert int(got[r, c]) == murmur3(key)


def test_a_kernel_without_stand_in_can_be_imported_and_says_so_when_called():
    from sgl_kernel import verify_tree_greedy

    with pytest.raises(NotImplementedError, match="verify_tree_greedy needs a GPU"):
        verify_tree_greedy()


def test_kv_goes_to_the_host_pool_and_back_unchanged_in_both_layouts():
    layers, page, tokens = 3, 4, 32
    device = [torch.randn(tokens, 2, 8) for _ in range(layers)]
    source, target = torch.arange(8, 16), torch.tensor([4, 5, 6, 7, 20, 21, 22, 23])
    host = [torch.zeros(tokens, 2, 8) for _ in range(layers)]
    kv_copies.transfer_kv_direct(device, host, source, target, page)
    assert all(torch.equal(h[target], d[source]) for h, d in zip(host, device, strict=True))
    pages = [torch.zeros(tokens // page, layers, page, 2, 8)]
    kv_copies.transfer_kv_all_layer_direct_lf_pf(device, pages, source, target, page)
    for layer in range(layers):
        back = torch.zeros(tokens, 2, 8)
        kv_copies.transfer_kv_per_layer_direct_pf_lf(pages, [back], target, source, layer, page)
        assert torch.equal(back[source], device[layer][source])


@pytest.mark.parametrize("shape", [(64, 192), (256, 97), (768, 256)])
def test_a_products_row_has_the_same_bits_among_any_other_rows(shape):
    weight = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(0)).t()
    rows, bias = torch.randn(600, shape[0], generator=torch.Generator().manual_seed(1)), torch.ones(shape[1])
    want = invariant.product(rows, weight)
    torch.testing.assert_close(want, rows @ weight)
    for first in (0, 7):
        for n in [*range(1, 40), 64, 100, 127, 300, 511]:
            some = rows[first : first + n]
            assert torch.equal(invariant.product(some, weight), want[first : first + n]), n
            assert torch.equal(invariant.product_plus(bias, some, weight), want[first : first + n] + bias), n


@pytest.mark.parametrize(("size", "share"), [(16, 2), (64, 3)])
def test_a_querys_attention_has_the_same_bits_decoded_prefilled_over_a_prefix_and_in_any_batch(size, share):
    draw, heads, length, block = torch.Generator().manual_seed(size), 2, 300, invariant.BLOCK
    keys, values = torch.randn(2, 1, heads, 3 * block, size, generator=draw)
    queries = torch.randn(1, heads, length * share, size, generator=draw)
    seen = (torch.arange(length) + 1).repeat_interleave(share)[None]
    whole = invariant.attend(queries, keys, values, seen, 0.25)
    plain = torch.nn.functional.scaled_dot_product_attention(
        queries[:, :, ::share].contiguous(), keys[:, :, :length], values[:, :, :length], is_causal=True, scale=0.25
    )
    torch.testing.assert_close(whole[:, :, ::share], plain)
    for place in (0, 1, 15, 16, 100, block - 1, block, block + 1, 255, 299):
        for width in (1, 2, 9, 64):
            cut = slice(place * share, min(place + width, length) * share)
            upto = -(-min(place + width, length) // block) * block
            some = invariant.attend(queries[:, :, cut], keys[:, :, :upto], values[:, :, :upto], seen[:, cut], 0.25)
            assert torch.equal(some, whole[:, :, cut]), (place, width)
        others = [torch.randn(5, heads, n, size, generator=draw) for n in (share, 3 * block, 3 * block)]
        others[0][2], others[1][2], others[2][2] = queries[0, :, place * share : (place + 1) * share], keys[0], values[0]
        sight = torch.full((5, share), 200)
        sight[2] = place + 1
        assert torch.equal(invariant.attend(*others, sight, 0.25)[2], whole[0, :, place * share : (place + 1) * share]), place


def world(folder: Path, *, torch_cuda: str | None = None, **distributions: str) -> str:
    """A folder that, first on the path, makes those distributions seem installed. Returns what `import sglang` says."""
    for name, version in distributions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    if torch_cuda:
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").write_text("raise ImportError('its libraries are not here')")
        (folder / "torch/version.py").write_text(f"cuda: Optional[str] = '{torch_cuda}'\n")
    (folder / "sglang.py").write_text("print('imported')")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", "import sglang"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_it_lets_the_sglang_it_fits_be_imported(tmp_path):
    assert world(tmp_path, sglang=SGLANG) == "imported\n"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sglang_kernel": "0.4.10"}, "sglang-kernel 0.4.10 is installed"),
        ({"torch_cuda": "13.0"}, "torch is a build for CUDA 13.0"),
        ({"sglang": "0.5.24"}, f"sglang 0.5.24 is installed; this fits {SGLANG} only"),
    ],
    ids=["real kernels", "CUDA torch", "another sglang"],
)
def test_it_refuses_at_import_with_the_reason_and_the_mend(tmp_path, wrong, words):
    said = world(tmp_path, **wrong)
    assert "imported" not in said
    assert "ImportError: milkweed-sglang-cpu refuses" in said and words in said and "install" in said
