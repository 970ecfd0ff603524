"""The suite's names bound to TRL 1.16 (`tools/conformance.py` runs it, in an environment of its own).

TRL's losses are methods of trainers; they are called unbound on a stand-in that gives them the log-probs of the case
and the options of a real configuration. What TRL computes inside larger methods (advantages, corrections) has no
function to call and counts as unsupported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from conformance_suite import Unsupported
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax


def floats(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def accelerator() -> SimpleNamespace:
    same = lambda x, *_, **__: x  # noqa: E731
    return SimpleNamespace(
        reduce=same, gather=same, gather_for_metrics=same, num_processes=1, sync_gradients=True, device="cpu"
    )


def grpo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, reference: Tensor | None = None, **o: Any):
    """One call of GRPOTrainer's loss on rows of completion tokens."""
    args = SimpleNamespace(
        delta=o.get("delta"), use_bias_correction_kl=o.get("weighted", False), steps_per_generation=o.get("steps", 1)
    )
    trainer = SimpleNamespace(
        args=args,
        beta=o.get("beta", 0.0),
        epsilon_low=o.get("low", 0.2),
        epsilon_high=o.get("high", 0.2),
        importance_sampling_level=o.get("level", "token"),
        loss_type=o.get("loss_type", "grpo"),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=o.get("length"),
        current_gradient_accumulation_steps=o.get("steps", 1),
        accelerator=accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids, completion_mask=mask)
    inputs |= dict(advantages=advantages, old_per_token_logps=old, num_items_in_batch=o.get("items", mask.sum()))
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    return GRPOTrainer._compute_loss(trainer, None, inputs)


class Adapter:
    name = "TRL 1.16"

    def call(self, function: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        handler: Callable[..., dict[str, Any]] | None = getattr(self, function.replace(".", "_"), None)
        if handler is None:
            raise Unsupported(function)
        out = handler(dict(inputs), dict(params))
        return {k: v.detach().tolist() if isinstance(v, Tensor) else v for k, v in out.items()}

    def _tokens(self, i: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Each token as a row of its own, so that a loss of a token comes out."""
        logprobs = floats(i["logprobs"]).requires_grad_()
        rest = [floats(i[n]) for n in ("old_logprobs", "advantages", "mask")]
        reference = floats(i["reference_logprobs"]) if "reference_logprobs" in i else None
        losses = []
        for at in range(logprobs.numel()):
            one = [x.reshape(-1)[at].reshape(1, 1) for x in [logprobs, *rest]]
            ref = None if reference is None else reference.reshape(-1)[at].reshape(1, 1)
            losses.append(grpo(*one, ref, **{"items": torch.tensor(1.0), **options}))
        loss = torch.stack(losses).reshape(logprobs.shape)
        loss.sum().backward()
        return {"loss": loss, "gradient": logprobs.grad}

    def loss_ppo_clip(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        shapes = {tuple(floats(i[n]).shape) for n in ("logprobs", "old_logprobs", "mask")}
        if len(shapes) > 1:
            raise Unsupported("the stand-in takes tokens one by one, so shapes cannot be told")
        if floats(i["advantages"]).shape not in shapes:
            raise Unsupported("TRL broadcasts advantages by row on purpose")
        return self._tokens(i, low=p["clip"], high=p.get("clip_high", p["clip"]), delta=p.get("dual_clip"))

    def loss_gspo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p.get("per_token"):
            raise Unsupported("GSPO-token")
        logprobs = floats(i["logprobs"]).requires_grad_()
        old, advantages, mask = (floats(i[n]) for n in ("old_logprobs", "advantages", "mask"))
        rows = []
        for r in range(len(mask)):
            one = logprobs[r : r + 1], old[r : r + 1], advantages[r : r + 1, 0], mask[r : r + 1]
            low, high = p.get("clip", 3e-4), p.get("clip_high", 4e-4)
            rows.append(grpo(*one, low=low, high=high, level="sequence") * mask[r])
        loss = torch.stack(rows)
        loss.sum().backward()
        return {"loss": loss, "gradient": logprobs.grad}

    def loss_cispo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p.get("min_ratio"):
            raise Unsupported("lower bound")
        return self._tokens(i, high=p.get("max_ratio", 5.0), loss_type="cispo")

    def loss_batch(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if "entropies" in i:
            raise Unsupported("a stand-in gives no entropies")
        losses, mask, parts = floats(i["token_losses"]), floats(i["mask"]), i["micro_batches"]
        kind = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}[p["normalise"]]
        total = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            zero = torch.zeros_like(losses[rows])
            options = dict(loss_type=kind, length=p.get("constant"), steps=len(parts), items=mask.sum())
            total = total + grpo(zero, zero, -losses[rows], mask[rows], **options)  # at ratio 1 the loss is -A
        return {"loss": total}

    def kl_estimate(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p["kind"] not in ("k3", "k4"):
            raise Unsupported(p["kind"])
        if p["kind"] == "k4":
            raise Unsupported("no choice of estimator")
        zero = [[0.0] * len(row) for row in i["logprobs"]]
        out = self._tokens(i | {"old_logprobs": i["logprobs"], "advantages": zero}, beta=1.0)
        return {"value": out["loss"], "gradient": out["gradient"]}

    def kl_expected_gradient(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p["kind"] != "k3":
            raise Unsupported(p["kind"])
        logits = floats(i["logits"]).requires_grad_()
        logprobs, reference = logits.log_softmax(-1), floats(i["reference_logits"]).log_softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for word in range(len(logits)):
            p_word = logprobs[word].reshape(1, 1)
            args = p_word, p_word.detach(), torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
            kl = grpo(*args, reference[word].reshape(1, 1), beta=1.0, weighted=bool(p.get("weighted")))
            total = total + kl * p_word.detach().exp()
        total.backward()
        return {"gradient": logits.grad}

    def entropy_vocabulary(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return {"entropy": entropy_from_logits(floats(i["logits"]))}

    def logprobs_token(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if p.get("temperature", 1.0) != 1.0:
            raise Unsupported("temperature is the trainer's")
        tokens = torch.tensor(i["tokens"])
        shifted = selective_log_softmax(floats(i["logits"])[:, :-1], tokens[:, 1:])
        return {"logprobs": torch.cat([torch.zeros(len(tokens), 1, dtype=torch.float64), shifted], 1)}

    # preferences: pairs one by one, completions of one token, so that sums and means agree ---------------------------

    def _pairs(self, i: dict[str, Any], loss: Callable[..., Tensor], *names: str) -> dict[str, Any]:
        sides = [floats(i[n]).requires_grad_() for n in ("chosen", "rejected", *names)]
        out = torch.stack([loss(*(s[at : at + 1] for s in sides)).reshape(()) for at in range(len(sides[0]))])
        out.sum().backward()
        return {"loss": out, "gradient": sides[0].grad, "gradient_rejected": sides[1].grad}

    def _dpo(self, i: dict[str, Any], beta: float, kind: str) -> dict[str, Any]:
        def loss(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor) -> Tensor:
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=True),
                accelerator=accelerator(),
                aux_loss_enabled=False,
                ld_alpha=None,
                precompute_ref_logps=True,
                f_divergence_type="reverse_kl",
                loss_types=[kind],
                loss_weights=[1.0],
                beta=beta,
                use_weighting=False,
                label_smoothing=0.0,
                _metrics=defaultdict(lambda: defaultdict(list)),
                _total_train_tokens=0,
                _tp_size=1,
            )
            logprobs = torch.cat([chosen, rejected])[:, None]
            nothing = torch.zeros_like(logprobs)  # what only its metrics read
            output = SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
            ids, mask = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0, 1], [0, 1]])
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), completion_mask=mask)
            inputs |= dict(ref_chosen_logps=reference_chosen, ref_rejected_logps=reference_rejected)
            return DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)

        return self._pairs(i, loss, "reference_chosen", "reference_rejected")

    def preference_dpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        if "label_smoothing" in p:
            raise Unsupported("label smoothing of the sigmoid loss")
        return self._dpo(i, p["beta"], "sigmoid")

    def preference_ipo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        return self._dpo(i, p["beta"], "ipo")

    def preference_orpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        trainer = SimpleNamespace(beta=p.get("beta", 0.1), accelerator=accelerator())

        def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
            return -chosen - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]

        return self._pairs(i, loss)

    def preference_simpo(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        options = dict(alpha=0.0, loss_type="simpo", label_smoothing=0.0, accelerator=accelerator())
        trainer = SimpleNamespace(beta=p.get("beta", 2.0), simpo_gamma=p.get("margin", 1.0), **options)
        return self._pairs(i, lambda c, r: CPOTrainer.cpo_loss(trainer, c, r)[0])

    def preference_bradley_terry(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        def loss(chosen: Tensor, rejected: Tensor, *margin: Tensor) -> Tensor:
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=True),
                args=SimpleNamespace(center_rewards_coefficient=p.get("centre")),
                accelerator=accelerator(),
                _metrics=defaultdict(lambda: defaultdict(list)),
                _total_train_tokens=0,
                _tp_size=1,
            )
            output = SimpleNamespace(logits=torch.cat([chosen, rejected])[:, None])
            inputs = {"attention_mask": torch.ones(2, 1)} | ({"margin": margin[0]} if margin else {})
            return RewardTrainer.compute_loss(trainer, lambda **_: output, inputs)

        return self._pairs(i, loss, *(["margin"] if "margin" in i else []))

    def preference_kto(self, i: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
        logprobs, point = floats(i["logprobs"]).requires_grad_(), p.get("reference_point", 0.0)
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=accelerator(),
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            calculate_KL=True,
            loss_type="kto",
            beta=p.get("beta", 0.1),
            desirable_weight=p.get("desirable_weight", 1.0),
            undesirable_weight=p.get("undesirable_weight", 1.0),
            _compute_kl_logps=lambda *_: floats([point]),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )
        losses = []
        for at, desirable in enumerate(i["desirable"]):
            nothing = torch.zeros(1, 1, dtype=torch.float64)  # what only its metrics read
            said = logprobs[at].reshape(1, 1)
            output = SimpleNamespace(log_probs=said, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
            ids, mask = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0, 1]])
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), completion_mask=mask)
            inputs |= dict(label=torch.tensor([desirable]), ref_logps=floats([i["reference"][at]]), ref_KL_logps=floats([0.0]))
            losses.append(KTOTrainer._compute_loss(trainer, lambda output=output, **_: output, inputs, False).reshape(()))
        loss = torch.stack(losses)
        loss.sum().backward()
        return {"loss": loss, "gradient": logprobs.grad}
