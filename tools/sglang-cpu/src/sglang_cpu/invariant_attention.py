"""Attention backend of SGLang's deterministic mode on a CPU: `invariant.attend` over SGLang's KV pool."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_cpu.attention import BatchedAttention
from sglang_cpu.invariant import BLOCK, attend

_TILE = 256
"""Queries of one request attended at once; bounds the scores to tile x keys."""


class InvariantAttention(BatchedAttention):
    """`BatchedAttention` whose every query gets the same bits however it came: decoded or prefilled, alone or not, over
    new keys or cached ones."""

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        if self._groups is None and not mode.is_idle():
            raise NotImplementedError(
                "deterministic inference on a CPU knows decoder attention only: no sliding window, encoder or speculation"
            )

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        q = q.reshape(-1, heads, size)
        out = torch.empty_like(q)
        if forward_batch.forward_mode.is_decode():
            new, prefix = [1] * q.shape[0], (forward_batch.seq_lens - 1).tolist()
        else:
            new, prefix = forward_batch.extend_seq_lens.tolist(), forward_batch.extend_prefix_lens.tolist()
        first = [0]
        for n in new:
            first.append(first[-1] + n)
        single = [r for r, n in enumerate(new) if n == 1]
        for part in self._parts(single, prefix):
            self._attend_tile(q, out, layer, forward_batch, part, [first[r] for r in part], [prefix[r] for r in part], 1)
        for r, n in enumerate(new):
            if n > 1:
                for start in range(0, n, _TILE):
                    width = min(_TILE, n - start)
                    self._attend_tile(q, out, layer, forward_batch, [r], [first[r] + start], [prefix[r] + start], width)
        return out.reshape(-1, heads * size)

    def _attend_tile(self, q, out, layer, forward_batch, requests, places, positions, width) -> None:
        """`width` queries of each request, the first at `places` in the flat batch and at `positions` in its sequence."""
        kv_heads, size = layer.tp_k_head_num, layer.qk_head_dim
        share = layer.tp_q_head_num // kv_heads
        length = max(positions) + width
        padded = -(-length // BLOCK) * BLOCK
        table, pool_rows = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices[torch.tensor(requests)]
        index = table[pool_rows, : min(padded, table.shape[1])].long()
        if index.shape[1] < padded:
            index = torch.cat([index, index[:, :1].expand(-1, padded - index.shape[1])], dim=1)
        at = torch.tensor(positions)
        beyond = torch.arange(padded) >= (at + width)[:, None]
        index = torch.where(beyond, index[:, :1], index).flatten()  # read a token of the row: finite, and masked
        shape = (len(requests), padded, kv_heads, size)
        key, value = (
            b.flatten(1).index_select(0, index).view(shape).transpose(1, 2).to(q.dtype)
            for b in (self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        )
        rows = (torch.tensor(places)[:, None] + torch.arange(width)).flatten()
        queries = q.index_select(0, rows).view(len(requests), width, kv_heads, share, size).permute(0, 2, 1, 3, 4)
        seen = (at[:, None] + torch.arange(width) + 1).repeat_interleave(share, 1)
        mixed = attend(queries.reshape(len(requests), kv_heads, width * share, size), key, value, seen, layer.scaling)
        mixed = mixed.view(len(requests), kv_heads, width, share, size).permute(0, 2, 1, 3, 4)
        out.index_copy_(0, rows, mixed.reshape(len(rows), -1, size))
