"""Attention backend `torch_native_batched`: SGLang's `torch_native`, vectorised over the sequences of a batch.

`torch_native` runs one sequence after another, and for an extend over a cached prefix computes the prefix's queries
too. Here sequences of similar length are gathered, padded and attended as one batch (`batching.cut`):

- decode, and an extend by one token: the query heads that share a KV head are its query rows, so nothing is repeated
  for grouped-query attention; the mask is [rows, 1, 1, keys];
- an extend without prefix: causal, right padding is out of every real query's sight, no mask;
- an extend over a prefix: the prefix without causality (mask over keys only) and the new tokens causally, merged by
  their log-sum-exps. No mask is ever queries x keys, so memory stays linear in the number of tokens.

Sliding windows, encoders, cross attention, speculative batches and unequal head sizes go to `torch_native`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from sglang_cpu.batching import cut

# In elements of K gathered at once (V is as many): 32 MiB in fp32.
_BUDGET = 1 << 23
# Elements of padding whose gathering and attending costs about as much as one more group does (30 us).
_SAVING = 1 << 15

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # gives the log-sum-exp as well (torch 2.13)


class _Keys(NamedTuple):
    """KV of a group of rows: pool locations [rows * length], and a mask [rows, 1, 1, length] where lengths differ."""

    index: torch.Tensor
    mask: torch.Tensor | None
    rows: int
    length: int


class _Group(NamedTuple):
    """Rows attended together. `queries`: their places in the flat batch, [rows * width], padded with a row's first;
    None: the whole batch as it stands. `real`: which of them are not padding; None: all.
    `prefix` is attended without causality, `new` causally; either may be absent."""

    queries: torch.Tensor | None
    real: torch.Tensor | None
    width: int
    prefix: _Keys | None
    new: _Keys | None


class BatchedAttention(TorchNativeAttnBackend):
    def __init__(self, runner) -> None:
        super().__init__(runner)
        self._dtype = runner.dtype
        self._groups: list[_Group] | None = None  # None: this batch is torch_native's
        self._row = 0  # elements of one token's K; known from the pool when first asked

    # -- once for a forward pass ---------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = None
        special = forward_batch.encoder_lens is not None or forward_batch.spec_info is not None
        if special or self.use_sliding_window_kv_pool:
            return
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self._groups = self._plan_decode(forward_batch)
        elif mode.is_extend_without_speculative() and forward_batch.extend_seq_lens is not None:
            self._groups = self._plan_extend(forward_batch)

    def _cut(self, lengths: list[int]) -> list[list[int]]:
        if len(lengths) == 1:
            return [[0]]
        if not self._row:
            pool = self.token_to_kv_pool
            self._row = pool.get_key_buffer(getattr(pool, "start_layer", 0) or 0)[0].numel()
        return cut(lengths, saving=max(1, _SAVING // self._row), budget=max(1, _BUDGET // self._row))

    def _keys(self, pool_rows, lengths, length: int, start: torch.Tensor | None = None) -> _Keys:
        """Locations of `lengths[r]` tokens of each request from `start[r]` (0) on, padded to `length`."""
        table, rows = self.req_to_token_pool.req_to_token, len(pool_rows)
        if start is None:
            index = table[pool_rows, :length]
        else:  # padding may reach past the table's end: stay on the row's last column
            columns = (start[:, None] + torch.arange(length)).clamp_(max=table.shape[1] - 1)
            index = table[pool_rows[:, None], columns]
        mask = None
        if rows > 1 and int(lengths.min()) < length:
            beyond = torch.arange(length) >= lengths[:, None]
            index = torch.where(beyond, index[:, :1], index)  # read a token of the row: finite, and in cache already
            mask = torch.zeros(rows, 1, 1, length, dtype=self._dtype)
            mask.masked_fill_(beyond[:, None, None], float("-inf"))
        return _Keys(index.flatten(), mask, rows, length)

    def _plan_decode(self, batch) -> list[_Group]:
        lengths, pool_rows = batch.seq_lens, batch.req_pool_indices
        listed = lengths.tolist()
        parts = self._cut(listed)
        if len(parts) == 1:
            return [_Group(None, None, 1, self._keys(pool_rows, lengths, max(listed)), None)]
        groups = []
        for part in parts:
            rows = torch.tensor(part)
            keys = self._keys(pool_rows[rows], lengths[rows], max(listed[r] for r in part))
            groups.append(_Group(rows, None, 1, keys, None))
        return groups

    def _plan_extend(self, batch) -> list[_Group]:
        new, prefix = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
        first = [0]
        for n in new:
            first.append(first[-1] + n)
        single = [r for r, n in enumerate(new) if n == 1 and prefix[r] > 0]
        bare = [r for r, n in enumerate(new) if n > 0 and prefix[r] == 0]
        both = [r for r, n in enumerate(new) if n > 1 and prefix[r] > 0]
        groups = []
        for part in self._parts(single, prefix):
            groups.append(self._group(batch, part, first, [1] * len(part), [prefix[r] + 1 for r in part], None))
        for part in self._parts(bare, new):
            groups.append(self._group(batch, part, first, [new[r] for r in part], None, [0] * len(part)))
        for part in self._parts(both, new):
            for sub in self._parts(part, prefix):
                before = [prefix[r] for r in sub]
                groups.append(self._group(batch, sub, first, [new[r] for r in sub], before, before))
        return groups

    def _parts(self, rows: list[int], lengths: list[int]) -> list[list[int]]:
        return [[rows[n] for n in part] for part in self._cut([lengths[r] for r in rows])] if rows else []

    def _group(self, batch, rows, first, widths, before, start) -> _Group:
        """`before`: keys attended without causality, a row; `start`: where a row's causal keys begin, None for none."""
        pool_rows = batch.req_pool_indices[torch.tensor(rows)]
        width, wide = max(widths), torch.tensor(widths)
        place = torch.arange(width).expand(len(rows), width)
        inside = place < wide[:, None]
        queries = (torch.tensor([first[r] for r in rows])[:, None] + torch.where(inside, place, 0)).flatten()
        real = None if min(widths) == width else inside.flatten().nonzero().flatten()
        prefix = self._keys(pool_rows, torch.tensor(before), max(before)) if before else None
        # a causal query sees no padding behind it, so these keys need no mask
        causal = self._keys(pool_rows, wide, width, torch.tensor(start))._replace(mask=None) if start else None
        return _Group(queries, real, width, prefix, causal)

    # -- once a layer --------------------------------------------------------------------------------------------------

    def _mine(self, layer) -> bool:
        return (
            self._groups is not None
            and layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and (layer.sliding_window_size is None or layer.sliding_window_size <= -1)
            and layer.tp_k_head_num == layer.tp_v_head_num
            and layer.qk_head_dim == layer.v_head_dim
        )

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not self._mine(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not self._mine(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        out = None
        for group in self._groups:
            part = self._attend(q if group.queries is None else q.index_select(0, group.queries), layer, group)
            if group.queries is None:
                return part
            if out is None:
                out = torch.empty_like(q)
            if group.real is None:
                out.index_copy_(0, group.queries, part)
            else:
                out.index_copy_(0, group.queries[group.real], part[group.real])
        return torch.empty_like(q) if out is None else out

    def _gather(self, layer, keys: _Keys, dtype):
        """K and V as [rows, kv heads, length, head size], views of freshly gathered memory."""
        pool, shape = self.token_to_kv_pool, (keys.rows, keys.length, layer.tp_k_head_num, layer.qk_head_dim)
        return (
            buffer.flatten(1).index_select(0, keys.index).view(shape).transpose(1, 2).to(dtype)
            for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )

    def _attend(self, q, layer, group: _Group):
        """[rows * width, heads * size] -> the same shape."""
        heads, kv_heads, size = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        scale, width, share = layer.scaling, group.width, heads // kv_heads
        if group.new is None:  # one query a head: a KV head's query heads stand in for its query rows
            key, value = self._gather(layer, group.prefix, q.dtype)
            rows = q.view(-1, kv_heads, share, size)
            mixed = scaled_dot_product_attention(rows, key, value, attn_mask=group.prefix.mask, scale=scale)
            return mixed.reshape(-1, heads * size)
        q = q.view(-1, width, heads, size).transpose(1, 2)
        key, value = self._gather(layer, group.new, q.dtype)
        if group.prefix is None:
            mixed = scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale, enable_gqa=share > 1)
        else:
            q = q.contiguous()
            if share > 1:
                key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
            mixed, lse = _flash(q, key, value, 0.0, True, scale=scale)
            key, value = self._gather(layer, group.prefix, q.dtype)
            rows = q.view(-1, kv_heads, share * width, size)
            earlier, earlier_lse = _flash(rows, key, value, 0.0, False, attn_mask=group.prefix.mask, scale=scale)
            weight = torch.sigmoid(earlier_lse.reshape(lse.shape) - lse).unsqueeze(-1).to(mixed.dtype)
            mixed = torch.lerp(mixed, earlier.reshape(mixed.shape), weight)
        return mixed.transpose(1, 2).reshape(-1, heads * size)
