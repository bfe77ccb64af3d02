"""verl's keys for advantages, the loss, and what corrects or masks it."""

from __future__ import annotations

from typing import Any

from retool_mcore.config import Algorithm, RlConfig

ACTOR = "actor_rollout_ref.actor."
OPO = "retool_opo"  # verl/advantages.py registers it with verl
ESTIMATORS = {"ppo": "gae", "opo": OPO}  # verl's names of advantages where they are not ours
LOSSES = {"ppo": "vanilla"}  # and of losses
KL_TYPES = {"k3": "low_var_kl"}  # and of estimates of the divergence; verl's default is spelt so


def algorithm_keys(config: RlConfig) -> dict[str, Any]:
    a = config.algorithm
    constant_length = a.loss_agg == "seq-mean-token-sum-norm"
    return {
        "algorithm.adv_estimator": ESTIMATORS.get(a.name, a.name),
        "algorithm.norm_adv_by_std_in_grpo": a.normalize_by_std,
        "algorithm.gamma": a.gamma,
        "algorithm.lam": a.lam,
        # verl then fetches prompts one by one; our replay buffer does the filtering.
        "algorithm.filter_groups.enable": a.filter_groups,
        # verl trains the actor from the step of this number on.
        "trainer.critic_warmup": config.critic.warmup_steps + 1 if config.critic.warmup_steps else 0,
        ACTOR + "policy_loss.loss_mode": LOSSES.get(a.loss, a.loss),
        ACTOR + "clip_ratio": a.clip_low,
        ACTOR + "clip_ratio_low": a.clip_low,
        ACTOR + "clip_ratio_high": a.clip_high,
        ACTOR + "clip_ratio_c": a.clip_c,
        ACTOR + "tau_pos": a.tau_pos,
        ACTOR + "tau_neg": a.tau_neg,
        ACTOR + "loss_agg_mode": a.loss_agg,
        # Without it verl divides by the width of each micro-batch, its longest response.
        ACTOR + "loss_scale_factor": config.rollout.max_response_tokens if constant_length else None,
        **_divergence_keys(a),
        **{f"algorithm.rollout_correction.{key}": value for key, value in _correction(a).items()},
        **(_engine_log_prob_keys(a) if a.old_log_prob == "rollout" else {}),
    }


def _divergence_keys(a: Algorithm) -> dict[str, Any]:
    in_reward = a.kl_in == "reward"
    keys: dict[str, Any] = {
        "algorithm.use_kl_in_reward": in_reward,
        ACTOR + "use_kl_loss": a.kl_coef > 0 and not in_reward,
        ACTOR + "kl_loss_coef": a.kl_coef,
        ACTOR + "kl_loss_type": KL_TYPES.get(a.kl_type, a.kl_type),
    }
    if in_reward:
        keys |= {"algorithm.kl_penalty": a.kl_type, "algorithm.kl_ctrl.kl_coef": a.kl_coef}
    return keys


def _correction(a: Algorithm) -> dict[str, Any]:
    """Weights and rejection by the ratio of actor and engine: of verl's RolloutCorrectionConfig."""
    weighs, rejects = a.importance_sampling != "off", a.rejection != "off"
    ratio_bounds = f"{a.rejection_low}_{a.rejection_high}"
    return {
        "rollout_is": a.importance_sampling if weighs else None,
        # Two bounds in one text are verl's form of IcePop.
        "rollout_is_threshold": (
            f"{a.importance_low}_{a.importance_threshold}" if a.importance_low else a.importance_threshold
        ),
        "rollout_rs": a.rejection if rejects else None,
        "rollout_rs_threshold": (
            (ratio_bounds if a.rejection.endswith("k1") else str(a.rejection_high)) if rejects else None
        ),
    }


def _engine_log_prob_keys(a: Algorithm) -> dict[str, Any]:
    """The engine's log-probabilities as the old ones.

    verl's trainer then passes no importance weights to the loss and rejects nothing; its loss
    "bypass_mode" does both from its own forward pass.
    """
    keys: dict[str, Any] = {"algorithm.rollout_correction.bypass_mode": True}
    weighs = a.importance_sampling != "off"
    if weighs or a.rejection != "off":
        keys |= {
            ACTOR + "policy_loss.loss_mode": "bypass_mode",
            ACTOR + "policy_loss.rollout_correction": {
                "_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig",
                "bypass_mode": True,
                "loss_type": "reinforce" if weighs else "ppo_clip",
                **_correction(a),
            },
        }
    return keys
