"""Copies of KV between an engine's pool and its host pool, in torch (hierarchical cache, backend "direct").

A layer-first pool is one tensor a layer, [tokens, heads, dim]; a page-first one is [pages, layers, page, heads, dim].
Indices count tokens and name whole pages, in order. Names and arguments are those of the CUDA kernels they stand for.
"""

from __future__ import annotations

__all__ = ["transfer_kv_direct", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf"]


def _page_numbers(indices, page_size):
    return indices[::page_size] // page_size


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Layer-first to layer-first, all layers given."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target.index_copy_(0, dst_indices.long(), source.index_select(0, src_indices))


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Page-first to layer-first, one layer."""
    pages = _page_numbers(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target.index_copy_(0, dst_indices.long(), source[pages, layer_id].flatten(0, 1))


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Layer-first to page-first, all layers: `src_ptrs` lists every layer of the first target, then of the next."""
    pages = _page_numbers(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for n, source in enumerate(src_ptrs):
        rows = source.index_select(0, src_indices)
        dst_ptrs[n // layers][pages, n % layers] = rows.view(-1, page_size, *rows.shape[1:])
