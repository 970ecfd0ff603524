"""What a loss sees of a forward pass: token-aligned log-probs, and entropy and logits for those who ask; or values.

Logits come out of the model one token early (those at `t` speak of `t + 1`), cut over the vocabulary under tensor
parallelism and over the row under context parallelism. All of that ends here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from milkweed.types import Batch

_CHUNK = 1 << 22  # logits of one pass; bounds the temporaries to 16 MiB each


def _chunks(tokens: int, vocab: int) -> list[slice]:
    step = max(1, _CHUNK // max(1, vocab))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _logsumexp(z: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return torch.logsumexp(z, dim=-1)
    top = z.max(dim=-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top + _sum((z - top[:, None]).exp_().sum(dim=-1), group).log_()


class TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[label], saving nothing but the logits themselves.

    `logits` `[tokens, vocab share]`, `labels` `[tokens]`; `group` and `offset` place the share in the vocabulary.
    Returns (log-probs, log-sum-exp), both float32 `[tokens]`.
    """

    @staticmethod
    def forward(ctx, logits, labels, temperature, group, offset):
        vocab = logits.shape[1]
        out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        lse = torch.empty_like(out)
        local = labels - offset
        inside = (local >= 0) & (local < vocab)
        local = local.clamp(0, vocab - 1)
        for at in _chunks(*logits.shape):
            z = logits[at].float() if temperature == 1.0 else logits[at].float() / temperature
            lse[at] = _logsumexp(z, group)
            chosen = z.gather(1, local[at, None]).squeeze(1)
            out[at] = _sum(chosen * inside[at], group) - lse[at]
        ctx.save_for_backward(logits, local, inside, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        logits, local, inside, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        for at in _chunks(*logits.shape):
            z = logits[at].float() if ctx.temperature == 1.0 else logits[at].float() / ctx.temperature
            g = grad[at] / ctx.temperature
            p = (z - lse[at, None]).exp_().mul_(-g[:, None])
            p.scatter_add_(1, local[at, None], (g * inside[at])[:, None])
            out[at] = p
        return out, None, None, None, None


class TokenEntropy(torch.autograd.Function):
    """Entropy of softmax(logits / temperature), given the log-sum-exp. Arguments as for TokenLogprobs."""

    @staticmethod
    def forward(ctx, logits, lse, temperature, group):
        out = torch.empty_like(lse)
        for at in _chunks(*logits.shape):
            logp = logits[at].float() / temperature - lse[at, None]
            out[at] = -_sum((logp.exp() * logp).sum(dim=-1), group)
        ctx.save_for_backward(logits, lse, out)
        ctx.temperature = temperature
        return out

    @staticmethod
    def backward(ctx, grad):
        logits, lse, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        for at in _chunks(*logits.shape):
            logp = logits[at].float() / ctx.temperature - lse[at, None]
            out[at] = logp.exp() * (logp + entropy[at, None]) * (-grad[at] / ctx.temperature)[:, None]
        return out, None, None, None


class GatherRow(torch.autograd.Function):
    """Whole rows `[rows, seq, ...]` from each context-parallel rank's share of them.

    Every rank then computes the same loss on the same rows, so each takes back the gradient of its own share only.
    """

    @staticmethod
    def forward(ctx, share, group):
        ctx.at = dist.get_rank(group) * share.shape[1]
        ctx.length = share.shape[1]
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, share.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return grad[:, ctx.at : ctx.at + ctx.length].contiguous(), None


class Policy:
    """The PolicyOutput of one micro-batch. `logits` `[rows, share of seq, share of vocab]` as the model gave them."""

    def __init__(self, logits: torch.Tensor, batch: Batch, *, cp_group: Any, tp_group: Any, cp_slice: slice) -> None:
        self._full_logits = logits
        offset = 0
        if hasattr(logits, "to_local"):  # a DTensor, cut over the vocabulary
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)[1][-1]
            cut = any(p.is_shard() for p in logits.placements)
            logits = logits.to_local()
            tp_group = tp_group if cut else None
        else:
            tp_group = None
        self._temperature = float(batch.temperature) or 1.0  # 0 is greedy: log-probs at temperature 1
        self._cp_group, self._tp_group = cp_group, tp_group
        labels = torch.roll(batch.tokens, -1, dims=1)[:, cp_slice].reshape(-1)
        self._shape = logits.shape[:2]
        self._logits = logits.reshape(-1, logits.shape[-1])
        self._valid = (batch.segments >= 0) & (batch.positions > 0)
        ahead, self._lse = TokenLogprobs.apply(self._logits, labels, self._temperature, tp_group, offset)
        self.logprobs = self._aligned(ahead.view(self._shape))

    def _aligned(self, ahead: torch.Tensor) -> torch.Tensor:
        """Move what the model says of the next token onto that token; zero where nothing precedes it."""
        if self._cp_group is not None:
            ahead = GatherRow.apply(ahead, self._cp_group)
        moved = torch.roll(ahead, 1, dims=1)
        valid = self._valid if moved.ndim == 2 else self._valid[..., None]
        return torch.where(valid, moved, torch.zeros((), dtype=moved.dtype, device=moved.device))

    def entropy(self) -> torch.Tensor:
        """`[rows, seq]` entropy of the distribution each token was drawn from, at the batch's temperature."""
        out = TokenEntropy.apply(self._logits, self._lse, self._temperature, self._tp_group)
        return self._aligned(out.view(self._shape))

    def logits(self) -> torch.Tensor:
        """`[rows, seq, vocab]` the logits each token was drawn from, divided by the temperature. Large: the whole
        vocabulary on every rank."""
        full = self._full_logits
        if hasattr(full, "full_tensor"):
            from torch.distributed.tensor import Replicate

            full = full.redistribute(placements=[Replicate()] * full.device_mesh.ndim).to_local()
        return self._aligned(full.float() / self._temperature)

    def top(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs `[rows, seq, k]` of the k likeliest words for each token, best first; without gradient."""
        with torch.no_grad():
            logits = self.logits()
            best, ids = logits.topk(k, dim=-1)
            logprobs = best - logits.logsumexp(-1, keepdim=True)
            return ids, torch.where(self._valid[..., None], logprobs, torch.zeros((), device=logprobs.device))


class Values:
    """The ValueOutput of one micro-batch. `out` `[rows, share of seq, 1]` as the value head gave it; `values` is at the
    head's own position (that of the token just read) and knows no temperature."""

    def __init__(self, out: torch.Tensor, batch: Batch, *, cp_group: Any) -> None:
        values = (out.to_local() if hasattr(out, "to_local") else out).squeeze(-1).float()
        if cp_group is not None:
            values = GatherRow.apply(values, cp_group)
        self.values = torch.where(batch.segments >= 0, values, torch.zeros((), device=values.device))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a model with a value head has `values` only, no {name!r}: it is no policy")
