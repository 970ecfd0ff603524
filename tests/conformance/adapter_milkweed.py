"""The suite's names bound to Milkweed's functions, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from conformance_suite import Unsupported
from torch import Tensor

import milkweed.algorithms as mw
from milkweed.types import Sampling


def tensor(value: Any) -> Any:
    """Nested lists of bools, ints or floats as a tensor; anything else (None, names) as it is."""
    if not isinstance(value, list):
        return value
    try:
        made = torch.tensor(value)
    except (TypeError, ValueError):
        return value
    return made.to(torch.float64) if made.is_floating_point() else made


def mask_of(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.bool)


def floats(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def plain(value: Any) -> Any:
    return value.detach().tolist() if isinstance(value, Tensor) else value


class MilkweedAdapter:
    name = "milkweed"

    def call(self, function: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        handler: Callable[..., dict[str, Any]] | None = getattr(self, function.replace(".", "_"), None)
        if handler is None:
            raise Unsupported(function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {k: plain(v) for k, v in handler(dict(inputs), dict(params)).items()}

    # advantages ---------------------------------------------------------------------------------------------------

    def _advantages(self, algorithm: Callable[..., Tensor], i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        rewards, valid = mw.scored(i["rewards"])
        if "valid" in i:
            valid = valid & mask_of(i["valid"])
        groups = mw.group_ids(i["groups"])
        if "trajectories" in i:
            p["trajectories"] = mw.group_ids(i["trajectories"])
        return {"advantages": algorithm(rewards, groups, valid=valid, **p)}

    def advantages_grpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._advantages(mw.grpo, i, p)

    def advantages_dr_grpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._advantages(mw.dr_grpo, i, p)

    def advantages_rloo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._advantages(mw.rloo, i, p)

    def advantages_maxrl(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._advantages(mw.maxrl, i, p)

    def advantages_reinforce_plus_plus(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"advantages": mw.reinforce_plus_plus(floats(i["rewards"]), mask_of(i["mask"]), **p)}

    def advantages_reinforce_plus_plus_baseline(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        groups = mw.group_ids(i["groups"])
        return {"advantages": mw.reinforce_plus_plus_baseline(floats(i["rewards"]), groups, mask_of(i["mask"]), **p)}

    def advantages_per_token(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"advantages": mw.per_token(floats(i["advantages"]), mask_of(i["mask"]), tensor(i.get("segments")))}

    def advantages_from_token_rewards(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        rewards = mw.outcomes(floats(i["token_rewards"]), mask_of(i["mask"]))
        return {"rewards": rewards, "advantages": mw.grpo(rewards, mw.group_ids(i["groups"]), **p)}

    def groups_check_size(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mw.require_group_size(p["size"])
        return {}

    def groups_has_signal(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"kept": mw.has_signal(floats(i["raw_rewards"]), mw.group_ids(i["groups"]))}

    def groups_dynamic_sampling(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"kept": mw.dynamic_sampling(floats(i["raw_rewards"]), mw.group_ids(i["groups"]), **p)}

    def overlong_penalty(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"penalty": mw.soft_penalty(tensor(i["lengths"]), p["limit"], p["buffer"])}

    def overlong_cut(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"truncated": mw.cut_by_length(i["finish_reasons"])}

    # returns ------------------------------------------------------------------------------------------------------

    def returns_gae(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        options = {k: tensor(i[k]) for k in ("segments", "terminal", "truncated", "bootstrap") if k in i}
        out = mw.gae(floats(i["rewards"]), floats(i["values"]), mask_of(i["mask"]), **options, **p)
        return {"advantages": out.advantages, "returns": out.returns}

    def returns_discounted(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"returns": mw.discounted_returns(floats(i["rewards"]), mask_of(i["mask"]), **p)}

    def critic_values(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"values": mw.values_before(floats(i["head"]))}

    # losses of tokens ---------------------------------------------------------------------------------------------

    def _token_loss(self, loss: Callable[..., mw.TokenLoss], i: dict[str, Any], **options: Any) -> dict[str, Any]:
        logprobs = floats(i["logprobs"]).requires_grad_()
        out = loss(logprobs, floats(i["old_logprobs"]), floats(i["advantages"]), mask_of(i["mask"]), **options)
        out.loss.sum().backward()
        return {"loss": out.loss, "gradient": logprobs.grad} | out.metrics

    def loss_ppo_clip(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._token_loss(mw.ppo_clip, i, **p)

    def loss_gspo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._token_loss(mw.gspo, i, **p)

    def loss_cispo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._token_loss(mw.cispo, i, **p)

    def loss_ppo_corrected(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        clip = p.pop("clip")
        mask, old = mask_of(i["mask"]), floats(i["old_logprobs"])
        weights = mw.importance_weights(old, floats(i["behaviour_logprobs"]), mask, **p).weights

        def loss(*args: Tensor) -> mw.TokenLoss:
            out = mw.ppo_clip(*args, clip=clip)
            return mw.TokenLoss(out.loss * weights, out.metrics)

        return self._token_loss(loss, i) | {"weights": weights}

    def loss_batch(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        """Token losses of a batch, reduced in the micro-batches given, as the trainer does."""
        mask, losses = mask_of(i["mask"]), floats(i["token_losses"])
        if "entropies" in i and "fraction" in p:
            mask = mw.high_entropy_mask(floats(i["entropies"]), mask, p["fraction"])
        how = ("constant", p["constant"]) if p["normalise"] == "constant" else p["normalise"]
        weights = mw.loss_weights(mask, how).to(torch.float64)
        parts = [mw.masked_sum(losses[rows] * weights[rows], mask[rows]) for rows in i["micro_batches"]]
        return {"loss": torch.stack(parts).sum()}

    def loss_value(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mask = mask_of(i["mask"])
        values = floats(i["values"]).requires_grad_()
        weights = mw.loss_weights(mask).to(torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for rows in i["micro_batches"]:
            old, returns = floats(i["old_values"]), floats(i["returns"])
            out = mw.clipped_value_loss(values[rows], old[rows], returns[rows], mask[rows], clip=p.get("clip"))
            total = total + (out.loss * weights[rows]).sum()
        total.backward()
        return {"loss": total, "gradient": values.grad}

    def loss_entropy_filtered(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mask = mw.overlong_mask(mask_of(i["mask"]), mask_of(i["truncated"]))
        bonus = mw.entropy_bonus(floats(i["entropies"]), mask, p["coefficient"])
        return {"loss": (bonus * mw.loss_weights(mask)).sum()}

    def correction_weights(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        log = floats(i["log_ratios"])
        out = mw.importance_weights(log, torch.zeros_like(log), mask_of(i["mask"]), **p)
        return {"weights": out.weights, "gate": out.gate} | out.metrics

    def correction_check_support(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mw.require_full_support([Sampling(**p)])
        return {}

    # KL, entropy, log-probs ---------------------------------------------------------------------------------------

    def kl_estimate(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        logprobs = floats(i["logprobs"]).requires_grad_()
        value = mw.kl_estimate(logprobs, floats(i["reference_logprobs"]), mask_of(i["mask"]), p["kind"])
        value.sum().backward()
        return {"value": value, "gradient": logprobs.grad}

    def kl_expected_gradient(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        """Gradient with respect to the logits of the estimator as a loss, in expectation over the policy."""
        logits = floats(i["logits"]).requires_grad_()
        logprobs, reference = logits.log_softmax(-1)[None], floats(i["reference_logits"]).log_softmax(-1)[None]
        old = logprobs.detach() if p.get("weighted") else None
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        value = mw.kl_estimate(logprobs, reference, mask, p["kind"], old_logprobs=old)
        (value * logprobs.detach().exp()).sum().backward()
        return {"gradient": logits.grad}

    def masked_mean(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        x = floats(i["x"]).requires_grad_()
        mean = mw.masked_mean(x, mask_of(i["mask"]))
        mean.backward()
        return {"mean": mean, "gradient": x.grad}

    def entropy_completion_mean(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        aligned = mw.shift_to_tokens(floats(i["entropies"])[None])
        return {"mean": mw.masked_mean(aligned, mask_of(i["completion"])[None])}

    def entropy_vocabulary(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"entropy": mw.token_entropy(floats(i["logits"]))}

    def logprobs_token(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"logprobs": mw.token_logprobs(floats(i["logits"]), tensor(i["tokens"]), **p)}

    # supervised and preference ------------------------------------------------------------------------------------

    def sft_loss(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        segments = tensor(i["segments"])
        mask = mw.supervised_mask(mask_of(i["completion"]), segments, p.get("include", "completion"))
        logits = floats(i["logits"]).requires_grad_()
        logprobs = mw.token_logprobs(logits, tensor(i["tokens"]), segments=segments)
        loss = (mw.negative_log_likelihood(logprobs, mask) * mw.loss_weights(mask)).sum()
        loss.backward()
        return {"loss": loss, "trained": mask, "gradient": logits.grad}

    def _pairs(self, loss: Callable[..., mw.PairLoss], i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        names = [n for n in ("chosen", "rejected", "reference_chosen", "reference_rejected") if n in i]
        if "margin" in i:
            p["margin"] = floats(i["margin"])
        chosen, rejected, *rest = (floats(i[n]) for n in names)
        out = loss(chosen.requires_grad_(), rejected.requires_grad_(), *rest, **p).loss
        out.sum().backward()
        return {"loss": out, "gradient": chosen.grad, "gradient_rejected": rejected.grad}

    def preference_dpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._pairs(mw.dpo, i, p)

    def preference_ipo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._pairs(mw.ipo, i, p)

    def preference_orpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._pairs(mw.orpo, i, p)

    def preference_simpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._pairs(mw.simpo, i, p)

    def preference_bradley_terry(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._pairs(mw.bradley_terry, i, p)

    def preference_kto(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        logprobs = floats(i["logprobs"]).requires_grad_()
        loss = mw.kto(logprobs, floats(i["reference"]), mask_of(i["desirable"]), **p)
        loss.sum().backward()
        return {"loss": loss, "gradient": logprobs.grad}
