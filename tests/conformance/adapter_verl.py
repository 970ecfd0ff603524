"""The suite's names bound to verl 0.9.1 (`tools/conformance.py` runs it, in an environment of its own)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from conformance_suite import Unsupported
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


def floats(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def refuse_options(params: dict[str, Any], *known: str) -> None:
    for name in params:
        if name not in known:
            raise Unsupported(f"option {name}")


class Adapter:
    name = "verl 0.9.1"

    def call(self, function: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        handler: Callable[..., dict[str, Any]] | None = getattr(self, function.replace(".", "_"), None)
        if handler is None:
            raise Unsupported(function)
        out = handler(dict(inputs), dict(params))
        return {k: v.detach().tolist() if isinstance(v, Tensor) else v for k, v in out.items()}

    # advantages: outcome rewards on rows of one token ---------------------------------------------------------------

    def _outcome(self, algorithm: Callable[..., Any], i: dict[str, Any], **options: Any) -> dict[str, Any]:
        if "trajectories" in i or "valid" in i or None in i["rewards"]:
            raise Unsupported("entries left out, segments")
        rewards = floats(i["rewards"])[:, None]
        index = np.array([str(g) for g in i["groups"]], dtype=object)
        return {"advantages": algorithm(rewards, torch.ones_like(rewards), index=index, **options)[0][:, 0]}

    def advantages_grpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p.get("std", "unbiased") == "population" or p.get("scale", "group") != "group" or "single" in p:
            raise Unsupported(str(p))
        scaled = p.get("std", "unbiased") != "none"
        return self._outcome(core_algos.compute_grpo_outcome_advantage, i, norm_adv_by_std_in_grpo=scaled)

    def advantages_dr_grpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self.advantages_grpo(i, p | {"std": "none"})

    def advantages_rloo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        refuse_options(p)
        return self._outcome(core_algos.compute_rloo_outcome_advantage, i)

    def advantages_from_token_rewards(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        index = np.array(i["groups"], dtype=object)
        args = floats(i["token_rewards"]), floats(i["mask"])
        out = core_algos.compute_grpo_outcome_advantage(*args, index=index)[0]
        return {"rewards": args[0].sum(-1), "advantages": out.sum(-1) / args[1].sum(-1)}

    def advantages_reinforce_plus_plus(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        config = SimpleNamespace(gamma=p.get("discount", 1.0))
        args = floats(i["rewards"]), floats(i["mask"])
        return {"advantages": core_algos.compute_reinforce_plus_plus_outcome_advantage(*args, config=config)[0]}

    def advantages_reinforce_plus_plus_baseline(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mask = floats(i["mask"])
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = floats(i["rewards"])
        index = np.array(i["groups"], dtype=object)
        out = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index=index)
        return {"advantages": out[0]}

    def returns_discounted(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        config = SimpleNamespace(gamma=p["discount"])
        args = floats(i["rewards"]), floats(i["mask"])
        return {"returns": core_algos.compute_reinforce_plus_plus_outcome_advantage(*args, config=config)[1]}

    def returns_gae(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if set(i) - {"rewards", "values", "mask"} or set(p) - {"discount", "trace"}:
            raise Unsupported("terminal rewards, packing, truncation")
        mask, rewards, values = floats(i["mask"]), floats(i["rewards"]), floats(i["values"])
        with mock.patch.object(core_algos.verl_F, "masked_whiten", lambda x, m: x * m):  # ours does not whiten here
            out = core_algos.compute_gae_advantage_return(rewards, values, mask, p["discount"], p["trace"])
        return {"advantages": out[0], "returns": out[1]}

    # losses ---------------------------------------------------------------------------------------------------------

    def _policy(
        self, loss: Callable[..., Any], i: dict[str, Any], weights: Any = None, **config: Any
    ) -> dict[str, Any]:
        seen: dict[str, Tensor] = {}

        def keep_tokens(loss_mat: Tensor, loss_mask: Tensor, **_: Any) -> Tensor:
            seen["loss"] = torch.where(loss_mask.bool(), loss_mat, 0.0)
            return torch_functional.masked_sum(loss_mat, loss_mask)

        actor = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **config)
        logprobs = floats(i["logprobs"]).requires_grad_()
        rest = floats(i["old_logprobs"]), logprobs, floats(i["advantages"]), floats(i["mask"])
        with mock.patch.object(core_algos, "agg_loss", keep_tokens):
            total, _ = loss(*rest, config=actor, rollout_is_weights=weights)
        total.backward()
        return {"loss": seen["loss"], "gradient": logprobs.grad}

    def loss_ppo_clip(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        high = p.get("clip_high", p["clip"])
        ceiling = p.get("dual_clip", 1e9)  # verl always has a dual clip; so high that it is none
        bounds = dict(clip_ratio=p["clip"], clip_ratio_low=p["clip"], clip_ratio_high=high, clip_ratio_c=ceiling)
        return self._policy(core_algos.compute_policy_loss_vanilla, i, **bounds)

    def loss_gspo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        bounds = dict(clip_ratio_low=p.get("clip", 3e-4), clip_ratio_high=p.get("clip_high", 4e-4))
        return self._policy(core_algos.compute_policy_loss_gspo, i, **bounds)

    def loss_cispo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        bounds = dict(clip_ratio_low=1 - p.get("min_ratio", 0.0), clip_ratio_high=p.get("max_ratio", 5.0) - 1)
        return self._policy(core_algos.compute_policy_loss_cispo, i, **bounds)

    def loss_batch(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if "entropies" in i:
            raise Unsupported("high-entropy mask")
        mask, losses = floats(i["mask"]), floats(i["token_losses"])
        whole = dict(batch_num_tokens=mask.sum(), global_batch_size=(mask.sum(-1) > 0).sum())
        mode = MODES[p["normalise"]]
        parts = [
            core_algos.agg_loss(losses[rows], mask[rows], mode, loss_scale_factor=p.get("constant"), **whole)
            for rows in i["micro_batches"]
        ]
        return {"loss": torch.stack(parts).sum()}

    def loss_value(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        mask, values = floats(i["mask"]), floats(i["values"]).requires_grad_()
        returns, old, clip = floats(i["returns"]), floats(i["old_values"]), p.get("clip") or 1e9
        total = torch.zeros((), dtype=torch.float64)
        for rows in i["micro_batches"]:
            args = values[rows], returns[rows], old[rows], mask[rows], clip
            total = total + core_algos.compute_value_loss(*args, batch_num_tokens=mask.sum())[0]
        total.backward()
        return {"loss": total, "gradient": values.grad}

    def correction_weights(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        level = {"token": "token", "sequence_sum": "sequence"}.get(p.get("level", "token"))
        if level is None or p.get("mode", "truncate") != "truncate" or p.get("lower"):
            raise Unsupported(str(p))
        out = compute_rollout_correction_weights(floats(i["log_ratios"]), floats(i["mask"]), level, p.get("upper", 2.0))
        return {"weights": out[0]}

    # KL, entropy, means ---------------------------------------------------------------------------------------------

    def kl_estimate(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        logprobs, mask = floats(i["logprobs"]).requires_grad_(), floats(i["mask"])
        kl = core_algos.kl_penalty(logprobs, floats(i["reference_logprobs"]), p["kind"])
        torch_functional.masked_sum(kl, mask).backward()
        return {"value": torch.where(mask.bool(), kl, 0.0), "gradient": logprobs.grad}

    def kl_expected_gradient(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p.get("weighted"):
            raise Unsupported("importance-weighted KL")
        logits = floats(i["logits"]).requires_grad_()
        logprobs, reference = logits.log_softmax(-1), floats(i["reference_logits"]).log_softmax(-1)
        (core_algos.kl_penalty(logprobs, reference, p["kind"]) * logprobs.detach().exp()).sum().backward()
        return {"gradient": logits.grad}

    def masked_mean(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        x = floats(i["x"]).requires_grad_()
        mean = torch_functional.masked_mean(x, floats(i["mask"]))
        mean.backward()
        return {"mean": mean, "gradient": x.grad}

    def entropy_vocabulary(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"entropy": torch_functional.entropy_from_logits(floats(i["logits"]))}
