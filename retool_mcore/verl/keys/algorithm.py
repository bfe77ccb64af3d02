"""verl's keys for advantages, the loss, importance weights and rejection."""

from typing import Any

from retool_mcore.config import Algorithm, RlConfig
from retool_mcore.verl.keys.key import ACTOR_PREFIX, OLD_LOG_PROB, Key, from_setting

CORRECTION = "algorithm.rollout_correction."
OPO = "retool_opo"  # verl/advantages.py registers it
# Our names -> verl's names, where they differ.
ESTIMATORS = {"ppo": "gae", "opo": OPO}
LOSSES = {"ppo": "vanilla"}
KL_TYPES = {"k3": "low_var_kl"}


def _uses_engine_log_probs(run: RlConfig) -> bool:
    """Whether the engine's log-probs are the old log-probs.

    verl's trainer then computes no importance weights and rejects nothing. Its loss "bypass_mode"
    does both, from its own forward pass.
    """
    return run.algorithm.old_log_prob == "rollout"


def _corrects_in_the_loss(run: RlConfig) -> bool:
    a = run.algorithm
    return _uses_engine_log_probs(run) and (a.importance_sampling != "off" or a.rejection != "off")


def _loss_mode(run: RlConfig) -> str:
    return "bypass_mode" if _corrects_in_the_loss(run) else LOSSES.get(run.algorithm.loss, run.algorithm.loss)


def _kl_is_in_reward(run: RlConfig) -> bool:
    return run.algorithm.kl_in == "reward"


def _loss_scale(run: RlConfig) -> int | None:
    """The divisor of "seq-mean-token-sum-norm", in tokens.

    By default verl divides by the longest response of each micro-batch.
    """
    return run.rollout.max_response_tokens if run.algorithm.loss_agg == "seq-mean-token-sum-norm" else None


def _correction(a: Algorithm) -> dict[str, Any]:
    """The fields of verl's RolloutCorrectionConfig for importance weights and rejection."""
    weighs, rejects = a.importance_sampling != "off", a.rejection != "off"
    low, threshold = a.importance_bounds
    least, most = a.rejection_bounds
    return {
        "rollout_is": a.importance_sampling if weighs else None,
        # verl selects IcePop by two bounds in one string.
        "rollout_is_threshold": f"{low}_{threshold}" if low else threshold,
        "rollout_rs": a.rejection if rejects else None,
        "rollout_rs_threshold": ((f"{least}_{most}" if a.rejection.endswith("k1") else str(most)) if rejects else None),
    }


def _correction_in_the_loss(run: RlConfig) -> dict[str, Any]:
    return {
        "_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig",
        "bypass_mode": True,
        "loss_type": "ppo_clip" if run.algorithm.importance_sampling == "off" else "reinforce",
        **_correction(run.algorithm),
    }


# The functions take the run.
ALGORITHM = (
    Key(
        "algorithm.adv_estimator", "algorithm.name", lambda run: ESTIMATORS.get(run.algorithm.name, run.algorithm.name)
    ),
    from_setting("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_by_std"),
    from_setting("algorithm.gamma", "algorithm.gamma"),
    from_setting("algorithm.lam", "algorithm.lam"),
    # PF-PPO resamples rows, but verl's trainer stores the results under the keys of the old rows.
    Key("algorithm.use_pf_ppo", "algorithm.name"),
    Key("algorithm.pf_ppo", "algorithm.name"),
    # With filter_groups verl fetches prompts one by one; our replay buffer filters.
    Key("algorithm.filter_groups", "algorithm.filter_groups"),
    Key("algorithm.filter_groups.enable", "algorithm.filter_groups", lambda run: run.algorithm.filter_groups > 0),
    # verl trains the actor from this step number on.
    Key(
        "trainer.critic_warmup",
        "critic.warmup_steps",
        lambda run: run.critic.warmup_steps + 1 if run.critic.warmup_steps else 0,
    ),
    Key(ACTOR_PREFIX + "policy_loss.loss_mode", "algorithm.loss", _loss_mode),
    Key(ACTOR_PREFIX + "clip_ratio", "algorithm.clip", lambda run: run.algorithm.clip[0]),
    Key(ACTOR_PREFIX + "clip_ratio_low", "algorithm.clip", lambda run: run.algorithm.clip[0]),
    Key(ACTOR_PREFIX + "clip_ratio_high", "algorithm.clip", lambda run: run.algorithm.clip[1]),
    Key(ACTOR_PREFIX + "clip_ratio_c", "algorithm.clip", lambda run: run.algorithm.clip_c),
    Key(ACTOR_PREFIX + "tau_pos", "algorithm.tau", lambda run: run.algorithm.tau[0]),
    Key(ACTOR_PREFIX + "tau_neg", "algorithm.tau", lambda run: run.algorithm.tau[1]),
    from_setting(ACTOR_PREFIX + "loss_agg_mode", "algorithm.loss_agg"),
    Key(ACTOR_PREFIX + "loss_scale_factor", "algorithm.loss_agg", _loss_scale),
    Key("algorithm.use_kl_in_reward", "algorithm.kl_in", _kl_is_in_reward),
    Key(
        ACTOR_PREFIX + "use_kl_loss",
        "algorithm.kl_coef",
        lambda run: run.algorithm.kl_coef > 0 and not _kl_is_in_reward(run),
    ),
    from_setting(ACTOR_PREFIX + "kl_loss_coef", "algorithm.kl_coef"),
    Key(
        ACTOR_PREFIX + "kl_loss_type",
        "algorithm.kl_type",
        lambda run: KL_TYPES.get(run.algorithm.kl_type, run.algorithm.kl_type),
    ),
    from_setting("algorithm.kl_penalty", "algorithm.kl_type", when=_kl_is_in_reward),
    from_setting("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", when=_kl_is_in_reward),
    *(
        Key(CORRECTION + name, setting, lambda run, name=name: _correction(run.algorithm)[name])
        for name, setting in (
            ("rollout_is", "algorithm.importance_sampling"),
            ("rollout_is_threshold", "algorithm.importance_bounds"),
            ("rollout_rs", "algorithm.rejection"),
            ("rollout_rs_threshold", "algorithm.rejection_bounds"),
        )
    ),
    Key(CORRECTION + "bypass_mode", OLD_LOG_PROB, True, when=_uses_engine_log_probs),
    Key(CORRECTION + "loss_type", OLD_LOG_PROB),
    Key(ACTOR_PREFIX + "policy_loss.rollout_correction", None, _correction_in_the_loss, when=_corrects_in_the_loss),
    Key(ACTOR_PREFIX + "use_rollout_log_probs", OLD_LOG_PROB),
)
# Refused only with algorithm.old_log_prob = "rollout". With "actor" users may set other keys of
# this table, which some of verl's losses read and for which we have no setting.
ENGINE_LOG_PROB = (Key(ACTOR_PREFIX + "policy_loss", OLD_LOG_PROB),)
