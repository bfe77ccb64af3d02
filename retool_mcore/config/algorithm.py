"""The RL algorithm: advantages, the policy loss, off-policy corrections and the critic."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import LearningRate, Pair, Section

NonNegative = Annotated[float, Field(ge=0)]
Discount = Annotated[float, Field(ge=0, le=1)]
# Defaults that also mean "not set". Any other value is an error if it has no effect.
CLIP_C, TAU, DEFAULT_IMPORTANCE_BOUNDS, UNSET_REJECTION_BOUNDS = 10.0, [1.0, 1.05], [0.0, 2.0], [0.0, 0.0]
REFILL_BATCHES = 10  # for failed and stale prompts, without filter_groups
IN_GROUPS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # estimators that compare the responses to a prompt


class Algorithm(Section):
    """Advantages, the policy loss, and what the loss masks or reweights.

    verl implements all of them. DAPO is GRPO with clip = [0.2, 0.28], loss_agg "token-mean",
    filter_groups and reward.overlong_buffer_tokens. Dr. GRPO is GRPO with loss_agg
    "seq-mean-token-sum-norm" and normalize_by_std = false. docs/algorithms.md has a table of all
    losses.
    """

    name: Literal["grpo", "ppo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "grpo"
    """The advantage estimator. "ppo" trains a critic; the others use rewards alone.

    "grpo" subtracts the group's mean reward. "rloo" subtracts the mean reward of the group's other
    responses. "opo" subtracts the mean of the group's rewards, each weighted by its response's
    number of tokens in the loss. "reinforce_plus_plus" normalizes the discounted reward over the
    batch. "reinforce_plus_plus_baseline" subtracts the group's mean reward and normalizes over the
    batch.
    """

    loss: Literal["ppo", "gspo", "cispo", "sapo"] = "ppo"
    """The policy loss of a token, from its advantage and its probability ratio new / old.

    "ppo" clips the ratio; a clipped token has no gradient. "gspo" uses one ratio per response, the
    geometric mean of its tokens' ratios; its paper clips at 3e-4 and 4e-4. "cispo" uses the clipped
    ratio as a constant weight of the log-probability, so every token keeps a gradient. With
    clip[0] = 1, it has no lower bound, as in its paper. "sapo" replaces the clip with a smooth
    gate; see tau.
    """

    clip: list[float] = Field(default=[0.2, 0.28], min_length=2, max_length=3)
    """Clip range of a token's probability ratio: from 1 - clip[0] to 1 + clip[1].

    An optional third number, above 1, is the dual clip of loss "ppo": it bounds the ratio of tokens
    with a negative advantage. Its default is 10. Loss "sapo" does not clip, nor does the loss of
    old_log_prob = "rollout" with importance_sampling (docs/scheduling.md). In verl: clip_ratio_low,
    _high and _c.
    """

    tau: Pair = Field(default=TAU)
    """Loss "sapo": how steeply a token's weight falls as its ratio moves away from 1.

    The first number applies to tokens with a positive advantage, the second to all others. In the
    paper the second is larger.
    """

    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses are aggregated into the loss of an update.

    "token-mean" is the mean over all tokens. The others average one number per response:
    "seq-mean-token-mean" the mean over its tokens, "seq-mean-token-sum" their sum.
    "seq-mean-token-sum-norm" divides that sum by rollout.max_response_tokens, so a token counts the
    same in a response of any length.
    """

    normalize_by_std: bool = True
    """GRPO: divide a group's advantages by the standard deviation of its rewards."""

    gamma: Discount = 1.0
    """Discount per token of the final reward, for "ppo" and "reinforce_plus_plus" only."""

    lam: Discount = 1.0
    """PPO's lambda (GAE). 1 estimates the return from rewards alone.

    The critic is then the baseline. A lower value also estimates the return with the critic.
    """

    filter_groups: Annotated[int, Field(ge=0)] = 0
    """Replace prompts whose responses are all right or all wrong; 0: off.

    The number limits the replacements per step, in batches of prompts, for filtered, failed and
    stale prompts together (verl's max_num_gen_batches). With 0, the limit for failed and stale
    prompts is 10.
    """

    @property
    def max_refill_batches(self) -> int:
        """The most replacement prompts per step, in batches of prompts."""
        return self.filter_groups or REFILL_BATCHES

    mask: list[Literal["truncated", "void_turns"]] = Field(default=[])
    """Responses to leave out of the loss. Their rewards still count in their group's mean.

    "truncated": responses cut off at rollout.max_response_tokens (DAPO's overlong filtering).
    "void_turns": responses with a turn that has neither a readable call nor an answer, as in
    SimpleTIR. With name "opo" their rewards do not count either.
    """

    importance_sampling: Literal["off", "token", "sequence"] = "off"
    """Weight each token's loss by p_actor / p_engine.

    p_actor is the token's probability under the trained weights, p_engine its probability in the
    engine that sampled it. "token" uses the token's ratio. "sequence" uses the product of the
    ratios over the response.
    """

    importance_bounds: Pair = Field(default=DEFAULT_IMPORTANCE_BOUNDS)
    """Bounds of the importance_sampling weight: the lower at most 1, the upper at least 1.

    With a lower bound of 0, a weight above the upper bound is truncated to it. With a lower bound
    above 0, a weight outside the bounds becomes 0 (IcePop, which uses 0.5 and 5). Such a token adds
    nothing to the loss but still counts in the mean.
    """

    rejection: Literal[
        "off", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ] = "off"  # fmt: skip
    """Leave tokens or responses out of the loss where engine and actor differ too much.

    With r = p_engine / p_actor of a token, k1 is log r, k2 is (log r)^2 / 2, and k3 is 1/r - 1 +
    log r. "token_*" judges each token. "seq_*" judges a response by the sum, mean or maximum over
    its tokens. "seq_mean_k1" is geometric rejection (Geo-RS). Rejected tokens still count in the
    means of loss_agg, so "token_*" cannot be combined with "seq-mean-token-mean".
    """

    rejection_bounds: Pair = Field(default=UNSET_REJECTION_BOUNDS)
    """Lower and upper bound of the values that rejection keeps.

    For k1 they bound the ratio exp(k1); Geo-RS uses 0.999 and 1.001. For k2 and k3 they bound the
    value, and the lower bound is 0.
    """

    old_log_prob: Literal["actor", "rollout"] = "actor"
    """Source of the old log-probabilities. See docs/scheduling.md, "Old log-probabilities".

    "actor": the actor computes them in a separate pass before the updates. "rollout": the engine
    returns them while it samples, which saves that pass.
    """

    router_replay: Literal["off", "R2", "R3"] = "off"
    """MoE models: the experts that the updates of a step route its tokens to.

    "off": the experts that the current weights choose. "R2": the experts of the pass before the
    updates, which computes the old log-probabilities. "R3": the experts that the engine sampled
    with, in that pass and in the updates. See docs/algorithms.md, "Router replay".
    """

    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the initial weights; 0: none, as in the paper."""

    kl_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """Estimator of that divergence per token, from d = log p - log p_initial.

    "k1": d; "k2": d^2 / 2; "k3": exp(-d) - 1 + d; "abs": |d|. In the loss, the gradient of k1 is 0
    on average and the gradient of k2 is that of the divergence. "k1+" and "k3+" are k1 and k3 with
    the gradient of k2.
    """

    kl_in: Literal["loss", "reward"] = "loss"
    """Add the divergence to the loss, or subtract it from token rewards (PPO, REINFORCE++)."""

    @property
    def clip_c(self) -> float:
        """The dual-clip bound."""
        return self.clip[2] if len(self.clip) == 3 else CLIP_C

    @property
    def compares_within_groups(self) -> bool:
        """Whether advantages need several responses to a prompt."""
        return self.name in IN_GROUPS

    @property
    def masks_responses(self) -> bool:
        return bool(self.mask)

    @model_validator(mode="after")
    def _check_pairs(self) -> Algorithm:
        low, high = self.importance_bounds
        wrong = [
            ("clip", min(self.clip) <= 0 or self.clip_c <= 1, "two numbers above 0, optionally a third above 1"),
            ("tau", min(self.tau) <= 0, "two numbers above 0"),
            ("importance_bounds", not 0 <= low <= 1 <= high, "a number from 0 to 1 and a number of at least 1"),
        ]
        for key, is_wrong, rule in wrong:
            if is_wrong:
                raise ValueError(f"algorithm.{key} = {getattr(self, key)} is out of range. Give {rule}")
        return self

    @model_validator(mode="after")
    def _check_no_unused_settings(self) -> Algorithm:
        """Refuse a setting that has no effect with the other settings."""
        loss, name = f'algorithm.loss = "{self.loss}"', f'algorithm.name = "{self.name}"'
        off, weighted = 'algorithm.{} = "off"', self.importance_sampling != "off"
        settings = [
            ("clip", self.clip_c != CLIP_C and self.loss != "ppo", f"{loss}, which has no dual clip"),
            ("tau", self.tau != TAU and self.loss != "sapo", loss),
            ("gamma", self.gamma != 1 and self.name not in ("ppo", "reinforce_plus_plus"), name),
            ("lam", self.lam != 1 and self.name != "ppo", name),
            (
                "importance_bounds",
                self.importance_bounds != DEFAULT_IMPORTANCE_BOUNDS and not weighted,
                off.format("importance_sampling"),
            ),
            (
                "rejection_bounds",
                self.rejection_bounds != UNSET_REJECTION_BOUNDS and self.rejection == "off",
                off.format("rejection"),
            ),
            ("kl_type", self.kl_type != "k3" and not self.kl_coef, "algorithm.kl_coef = 0"),
            ("kl_in", self.kl_in != "loss" and not self.kl_coef, "algorithm.kl_coef = 0"),
        ]
        for key, unused, because in settings:
            if unused:
                raise ValueError(
                    f"algorithm.{key} = {getattr(self, key)} has no effect with {because}. Leave out the first, or "
                    "change the second"
                )
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> Algorithm:
        if self.router_replay == "R2" and self.old_log_prob == "rollout":
            raise ValueError(
                'algorithm.router_replay = "R2" replays the experts of the pass that computes old log-probabilities, '
                'but algorithm.old_log_prob = "rollout" skips that pass. Use "R3", or old_log_prob = "actor"'
            )
        return self

    @model_validator(mode="after")
    def _loss_rules(self) -> Algorithm:
        if self.loss == "sapo" and self.loss_agg != "seq-mean-token-mean":
            raise ValueError(
                f'algorithm.loss = "sapo" does not support algorithm.loss_agg = "{self.loss_agg}". Set loss_agg = '
                '"seq-mean-token-mean"'
            )
        if self.kl_in == "reward" and self.kl_type.endswith("+"):
            raise ValueError(
                f'algorithm.kl_type = "{self.kl_type}" differs from "{self.kl_type[0:2]}" only in its gradient, but '
                f'with algorithm.kl_in = "reward" nothing uses the gradient. Use "{self.kl_type[0:2]}"'
            )
        if self.old_log_prob == "rollout" and (self.importance_sampling != "off" or self.rejection != "off"):
            self._check_bypass_mode()
        return self

    def _check_bypass_mode(self) -> None:
        """Refuse what verl's loss "bypass_mode" does not support.

        verl uses that loss for old_log_prob = "rollout" with importance_sampling or rejection.
        """
        what = "importance_sampling" if self.importance_sampling != "off" else "rejection"
        settings = f'algorithm.old_log_prob = "rollout" with algorithm.{what} = "{getattr(self, what)}"'
        if self.loss != "ppo":
            raise ValueError(
                f'{settings} uses a separate loss of verl, so it cannot use algorithm.loss = "{self.loss}". '
                'Set old_log_prob = "actor", or loss = "ppo"'
            )
        if self.masks_responses:
            raise ValueError(
                f"{settings} fails on a micro-batch in which algorithm.mask = {json.dumps(self.mask)} masks every "
                'response. Set old_log_prob = "actor", or leave out mask'
            )

    @model_validator(mode="after")
    def _rejection_rules(self) -> Algorithm:
        if self.rejection == "off":
            return self
        setting = f'algorithm.rejection = "{self.rejection}"'
        ratio, (low, high) = self.rejection.endswith("k1"), self.rejection_bounds
        if ratio and not 0 < low <= 1 <= high:
            raise ValueError(
                f"{setting} bounds a ratio, but algorithm.rejection_bounds = {self.rejection_bounds}. Set the first "
                "bound above 0 and at most 1, the second to at least 1"
            )
        if not ratio and (low or high <= 0):
            raise ValueError(
                f"{setting} has only an upper bound, but algorithm.rejection_bounds = {self.rejection_bounds}. Set "
                "the first bound to 0 and the second above 0"
            )
        self._check_rejected_tokens(setting)
        return self

    def _check_rejected_tokens(self, setting: str) -> None:
        if not self.rejection.startswith("token"):
            return
        instead = (
            'Reject whole responses ("seq_*"), or use algorithm.importance_sampling = "token" with a lower bound in '
            "importance_bounds, which gives tokens outside the bounds a weight of 0"
        )
        if self.loss_agg == "seq-mean-token-mean":
            raise ValueError(
                f'{setting} with algorithm.loss_agg = "{self.loss_agg}" would divide by only the kept tokens of a '
                f"response, but rejected tokens must count in the means. {instead}"
            )
        if self.loss == "gspo":
            raise ValueError(
                f'{setting} with algorithm.loss = "gspo" would compute a response\'s ratio from only its kept tokens. '
                f"{instead}"
            )
        if self.name in ("ppo", "reinforce_plus_plus"):
            raise ValueError(
                f'{setting} with algorithm.name = "{self.name}" would lose the reward of a rejected token. Reject '
                'whole responses ("seq_*"), or use another name'
            )


class Critic(Section):
    """PPO's value model: model.path with a new head, in the actor's layout.

    It uses the settings of [optim] except lr.
    """

    lr: LearningRate = 1e-5
    """Peak learning rate of the critic, instead of optim.lr."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that train only the critic. The actor's schedule starts after them."""
