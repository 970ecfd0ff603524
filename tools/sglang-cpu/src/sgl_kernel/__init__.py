"""Stands in for the `sgl_kernel` that the CUDA wheel sglang-kernel supplies: the two functions SGLang's CPU path needs.

SGLang finds no packed-weight operators here, so each layer takes its `forward_native`. Any other name can be imported,
and raises NotImplementedError when called (speculative decoding, state-space layers, quantised kernels).
"""

import torch

__version__ = "0.4.10"  # of the sglang-kernel that sglang 0.5.23 pins; SGLang compares it

_WORD = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write each request's new KV locations into its row: row r takes `[start, end)` from the flat list, in order."""
    lengths = (end_offset - start_offset).long()
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    columns = start_offset.long().repeat_interleave(lengths) + torch.arange(rows.numel()) - first
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def _rotate(word, bits):
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def _absorb(state, word):
    word = (_rotate((word * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _WORD


def _murmur_hash32(seed, positions, col_indices):
    """MurmurHash3 (x86, 32 bit) of (seed, position, column), 16 bytes each: [rows], [rows], [columns] -> uint32
    [rows, columns]. Seeded sampling draws its noise from it, so equal seeds give equal tokens."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    state = torch.zeros_like(seed)
    for word in (seed & _WORD, (seed >> 32) & _WORD, positions.long() & _WORD):
        state = _absorb(state, word)
    state = _absorb(state[:, None], (col_indices.long() & _WORD)[None, :]) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return (state ^ (state >> 16)).to(torch.uint32)


_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
_operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_operators.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: milkweed-sglang-cpu has no stand-in for it")

    absent.__name__ = name
    return absent
