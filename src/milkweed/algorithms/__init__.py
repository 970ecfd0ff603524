"""Algorithms as pure functions on tensors: no I/O, no state, no registry; imports only torch and `milkweed.types`.

Every tensor named `[rows, seq]` is aligned with the batch's tokens. NaN outside a mask never spreads, NaN inside it
surfaces. An algorithm of one's own is a function of the same shape, passed where these are.
"""

from milkweed.algorithms.advantages import (
    dr_grpo,
    grpo,
    maxrl,
    outcomes,
    per_token,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from milkweed.algorithms.correction import Corrected, Correction, importance_weights, require_full_support
from milkweed.algorithms.critic import ValueOutput, clipped_value_loss, last_values, value_loss, values_before
from milkweed.algorithms.distill import (
    distill_advantages,
    distill_loss,
    distill_top_k_loss,
    top_k_reverse_kl,
)
from milkweed.algorithms.entropy import entropy_bonus, high_entropy_mask
from milkweed.algorithms.filtering import dynamic_sampling, has_signal, signal_fraction
from milkweed.algorithms.groups import group_ids, require_group_size, scored
from milkweed.algorithms.kl import categorical_kl, kl_estimate, kl_in_reward
from milkweed.algorithms.logprobs import temper, token_entropy, token_logprobs
from milkweed.algorithms.losses import cispo_loss, grpo_loss, gspo_loss, ppo_loss, reinforce_loss, surrogate_loss
from milkweed.algorithms.masked import (
    keep,
    masked_mean,
    masked_sum,
    masked_var,
    segment_last,
    segment_mean,
    segment_spread,
    segment_sum,
    shift_to_tokens,
    whiten,
)
from milkweed.algorithms.normalise import loss_weights
from milkweed.algorithms.overlong import cut_by_length, overlong_mask, soft_penalty
from milkweed.algorithms.policy_loss import TokenLoss, cispo, gspo, ppo_clip, reinforce_term
from milkweed.algorithms.preference import (
    PairLoss,
    bradley_terry,
    dpo,
    ipo,
    kto,
    kto_reference_point,
    orpo,
    sequence_logprobs,
    simpo,
)
from milkweed.algorithms.preference_losses import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    pair_members,
    reward_model_loss,
    simpo_loss,
)
from milkweed.algorithms.returns import Returns, discounted_returns, gae, place_outcomes
from milkweed.algorithms.supervised import negative_log_likelihood, sft_loss, supervised_mask

__all__ = [
    "Corrected",
    "Correction",
    "PairLoss",
    "Returns",
    "TokenLoss",
    "ValueOutput",
    "bradley_terry",
    "categorical_kl",
    "cispo",
    "cispo_loss",
    "clipped_value_loss",
    "cut_by_length",
    "discounted_returns",
    "distill_advantages",
    "distill_loss",
    "distill_top_k_loss",
    "dpo",
    "dpo_loss",
    "dr_grpo",
    "dynamic_sampling",
    "token_entropy",
    "entropy_bonus",
    "gae",
    "group_ids",
    "grpo",
    "grpo_loss",
    "gspo",
    "gspo_loss",
    "has_signal",
    "high_entropy_mask",
    "importance_weights",
    "ipo",
    "ipo_loss",
    "keep",
    "last_values",
    "kl_estimate",
    "kl_in_reward",
    "kto",
    "kto_loss",
    "kto_reference_point",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "maxrl",
    "negative_log_likelihood",
    "loss_weights",
    "orpo",
    "orpo_loss",
    "outcomes",
    "overlong_mask",
    "pair_members",
    "per_token",
    "place_outcomes",
    "surrogate_loss",
    "ppo_clip",
    "ppo_loss",
    "reinforce",
    "reinforce_loss",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reinforce_term",
    "require_full_support",
    "require_group_size",
    "reward_model_loss",
    "rloo",
    "scored",
    "segment_last",
    "segment_mean",
    "segment_spread",
    "segment_sum",
    "sequence_logprobs",
    "sft_loss",
    "shift_to_tokens",
    "signal_fraction",
    "simpo",
    "simpo_loss",
    "soft_penalty",
    "supervised_mask",
    "temper",
    "token_logprobs",
    "top_k_reverse_kl",
    "value_loss",
    "values_before",
    "whiten",
]
