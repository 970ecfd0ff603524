"""On-policy distillation: the policy's own samples, and the reverse KL to a teacher at each of their tokens.

The teacher may be a reference actor or an engine: all it gives is log-probs, of the sampled tokens or of its k best.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from milkweed.algorithms.kl import Kind, kl_estimate
from milkweed.algorithms.masked import as_float, keep, same_shape
from milkweed.algorithms.policy_loss import TokenLoss, bounded_exp, log_ratio, ppo_clip
from milkweed.types import Batch, Loss, PolicyOutput

Tail = Literal["bucket", "renormalise"]


def distill_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`log teacher - log pi` of each sampled token, detached; `[rows, seq]`, 0 outside the mask.

    As advantages of a policy gradient they descend the reverse KL token by token (Gu et al. 2023, arXiv 2306.08543;
    Agarwal et al. 2023, arXiv 2306.13649). Raises ValueError where shapes differ.
    """
    return -log_ratio(logprobs, teacher_logprobs, mask).detach()


def log1mexp(x: Tensor) -> Tensor:
    """`log(1 - e^x)` for x <= 0, accurate at both ends; x at 0 is taken as the largest number below it, so the result
    is finite."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    zero = torch.full((), -1.0, dtype=x.dtype, device=x.device)  # where() both ways: the unused branch must stay finite
    return torch.where(
        near, (-torch.expm1(torch.where(near, x, zero))).log(), torch.log1p(-torch.where(near, zero, x).exp())
    )


def top_k_reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, tail: Tail = "bucket") -> Tensor:
    """Reverse KL over the teacher's k best words: `sum_v pi_v (log pi_v - log q_v)`; `[rows, seq]`.

    Both `[rows, seq, k]` log-probs over the full vocabulary, of the same k words at each token (the teacher's best).
    `tail` says what becomes of the rest: "bucket" treats all other words as one, a lower bound of the full KL that is 0
    only where all k agree; "renormalise" makes both sum to 1 over the k words, and ignores mass the policy puts
    elsewhere. Exact when k is the whole vocabulary. Gradients flow to `logprobs` only.
    Raises ValueError for an unknown tail or shapes that differ.
    """
    same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    if logprobs.shape[:-1] != mask.shape:
        raise ValueError(f"shapes differ: logprobs {tuple(logprobs.shape)}, mask {tuple(mask.shape)}")
    if tail not in ("bucket", "renormalise"):
        raise ValueError(f"tail must be 'bucket' or 'renormalise', not {tail!r}")
    wide = mask.unsqueeze(-1).expand(logprobs.shape)
    p, q = keep(logprobs, wide), keep(teacher_logprobs.detach(), wide)
    # a masked token has zeros everywhere, which no distribution has: give it a uniform one so that all stays finite
    uniform = -torch.log(torch.tensor(2.0 * p.shape[-1], dtype=p.dtype, device=p.device))
    p, q = torch.where(wide, p, uniform), torch.where(wide, q, uniform)
    p_mass, q_mass = p.logsumexp(-1), q.logsumexp(-1)
    if tail == "renormalise":
        p, q = p - p_mass.unsqueeze(-1), q - q_mass.unsqueeze(-1)
    ruled_out = p == -torch.inf
    gap = torch.where(ruled_out, 0.0, p) - torch.where(ruled_out, 0.0, q)
    kl = (torch.where(ruled_out, 0.0, p.exp()) * gap).sum(-1)
    if tail == "bucket":
        rest, teacher_rest = log1mexp(p_mass.clamp(max=0.0)), log1mexp(q_mass.clamp(max=0.0))
        kl = kl + rest.exp() * (rest - teacher_rest)
    return keep(kl, mask)


def _extra(batch: Batch, name: str, loss: str) -> Tensor:
    if name not in batch.extra:
        raise ValueError(f"{loss} needs batch.extra[{name!r}]")
    return batch.extra[name]


def _distill(batch: Batch, policy: PolicyOutput, *, kind: Kind, clip: float | None) -> TokenLoss:
    teacher = _extra(batch, "teacher_logprobs", "distill_loss")
    reverse_kl = kl_estimate(policy.logprobs, teacher, batch.mask, "k1").detach()
    if clip is not None:
        advantages = distill_advantages(batch.logprobs, teacher, batch.mask)
        out = ppo_clip(policy.logprobs, batch.logprobs, advantages, batch.mask, clip=clip)
        return TokenLoss(out.loss, out.metrics | {"reverse_kl": reverse_kl})
    log = log_ratio(policy.logprobs, batch.logprobs, batch.mask).detach()
    loss = bounded_exp(log).clamp(max=2.0) * kl_estimate(policy.logprobs, teacher, batch.mask, kind)
    return TokenLoss(keep(loss, batch.mask), {"reverse_kl": reverse_kl, "ratio": bounded_exp(log)})


def distill_loss(*, kind: Kind = "k1+", clip: float | None = None) -> Loss:
    """Reverse KL to a teacher on the sampled tokens, as a `Loss`.

    Reads `batch.extra["teacher_logprobs"]` `[rows, seq]`. Without `clip` it is `kl_estimate` of the given kind (a "+"
    kind has the exact gradient), weighted by the detached ratio to the sampling policy, cut at 2. With `clip` it is
    PPO's loss on `distill_advantages`, for several updates on one batch. Metric `reverse_kl` is k1.
    Raises ValueError where the teacher's log-probs are missing.
    """
    return partial(_distill, kind=kind, clip=clip)


def _distill_top_k(batch: Batch, policy: PolicyOutput, *, tail: Tail) -> TokenLoss:
    ids = _extra(batch, "teacher_top_ids", "distill_top_k_loss")
    teacher = _extra(batch, "teacher_top_logprobs", "distill_top_k_loss")
    logits = as_float(policy.logits())
    logprobs = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    kl = top_k_reverse_kl(logprobs, teacher, batch.mask, tail=tail)
    return TokenLoss(kl, {"reverse_kl": kl.detach()})


def distill_top_k_loss(*, tail: Tail = "bucket") -> Loss:
    """`top_k_reverse_kl` as a `Loss`: the gradient is over the distribution, not only over the sampled token.

    Reads `batch.extra["teacher_top_ids"]` int64 and `["teacher_top_logprobs"]`, `[rows, seq, k]`, of the words the
    teacher ranked best for each token (ids 0 where masked), and `policy.logits()`. Raises ValueError where one is
    missing.
    """
    return partial(_distill_top_k, tail=tail)
