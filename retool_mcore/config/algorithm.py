"""What RL learns from its responses by: advantages, the loss, its corrections, and the critic."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import LearningRate, Pair, Section

NonNegative = Annotated[float, Field(ge=0)]
Discount = Annotated[float, Field(ge=0, le=1)]
# A default that is also the value of "not set": another one is refused where nothing reads it.
CLIP_C, TAU, ANY_WEIGHT, ANY_GAP = 10.0, [1.0, 1.05], [0.0, 2.0], [0.0, 0.0]
REFILL_BATCHES = 10  # of failed or stale prompts, in a run that filters none
IN_GROUPS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # names that compare a prompt's responses


class Algorithm(Section):
    """Where advantages come from, the loss, and what is masked or weighted in it.

    All in verl's own implementations. DAPO is GRPO with clip = [0.2, 0.28], loss_agg
    "token-mean", filter_groups and reward.overlong_buffer_tokens. Dr. GRPO is GRPO with loss_agg
    "seq-mean-token-sum-norm" and normalize_by_std false. verl/README.md has a table of all losses.
    """

    name: Literal["grpo", "ppo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "grpo"
    """Where advantages come from: "ppo" trains a critic, the others use rewards alone.

    "grpo": the reward minus the group's mean; "rloo": minus the mean of the group's others; "opo":
    minus the group's mean weighted by tokens in the loss, so a response left out has no weight.
    "reinforce_plus_plus": the discounted reward, normalized over the batch;
    "reinforce_plus_plus_baseline": GRPO's difference, normalized so.
    """

    loss: Literal["ppo", "gspo", "cispo", "sapo"] = "ppo"
    """What is made of a token's advantage and its probability ratio to the old weights.

    "ppo": the ratio, clipped; a clipped token has no gradient. "gspo": one ratio for a response,
    the geometric mean of its tokens'; its paper clips at 3e-4 and 4e-4. "cispo": the clipped ratio
    is a constant weight of the log-probability, so every token keeps a gradient; a lower
    bound of 1 leaves that side open, as in its paper. "sapo": a smooth gate, tau, in place of the
    clip.
    """

    clip: list[float] = Field(default=[0.2, 0.28], min_length=2, max_length=3)
    """The probability ratio of a token is clipped below 1 - the first and above 1 + the second.

    A third, above 1, bounds the ratio in loss "ppo" of a token with a negative advantage (dual
    clip); 10 where it is left out. Not in loss "sapo". verl's clip_ratio_low, _high and _c.
    """

    tau: Pair = Field(default=TAU)
    """Loss "sapo": how steeply a token fades as its ratio leaves 1.

    The first is of tokens with a positive advantage, the second of the others; larger in its paper.
    """

    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How an update's loss is made of its tokens'.

    "token-mean": the mean over all tokens; the others: the mean over the responses of each one's
    mean or sum, or of its sum over rollout.max_response_tokens ("seq-mean-token-sum-norm": a token
    counts the same in a response of any length).
    """

    normalize_by_std: bool = True
    """GRPO: divide a group's advantages by the standard deviation of its rewards."""

    gamma: Discount = 1.0
    """Discount of the reward for each token before it; names "ppo" and "reinforce_plus_plus"."""

    lam: Discount = 1.0
    """PPO's lambda: 1 trusts the rewards alone, less than 1 the critic's values as well."""

    filter_groups: Annotated[int, Field(ge=0)] = 0
    """Replace a prompt whose answers are all right or all wrong by another one; 0: off.

    The number is the most prompts in place of others, filtered, failed or stale ones, per step, in
    batches of prompts, verl's max_num_gen_batches; 10, where it is 0, of those that failed.
    """

    @property
    def max_refill_batches(self) -> int:
        """The most prompts in place of others, per step, in batches of prompts."""
        return self.filter_groups or REFILL_BATCHES

    mask: list[Literal["truncated", "void_turns"]] = Field(default=[])
    """Responses that are left out of the loss. Their rewards still count in their group's mean.

    "truncated": those that rollout.max_response_tokens cut off; DAPO calls it overlong filtering.
    "void_turns": those with a turn that has neither a call that can be read nor an answer, as
    SimpleTIR does. Under "opo" their rewards do not count either.
    """

    importance_sampling: Literal["off", "token", "sequence"] = "off"
    """Weight a token's loss by its probability under the trained weights over the engine's.

    The engine is the one that sampled it. "token": by its own ratio; "sequence": by the product of
    the ratios over its response.
    """

    importance_bounds: Pair = Field(default=ANY_WEIGHT)
    """Bounds of the weight of importance_sampling: at most 1, and at least 1.

    The lower one 0: a weight above the upper one becomes the upper one. Above 0: a weight outside
    the two becomes 0 (IcePop, which has 0.5 and 5). The token then adds nothing to the loss, and
    still counts in its mean.
    """

    rejection: Literal[
        "off", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ] = "off"  # fmt: skip
    """Leave out of the loss tokens or whole responses on which engine and actor differ too much.

    With r the engine's probability of a token over the trained weights', k1 is log r, k2 is (log
    r)^2 / 2, k3 is 1/r - 1 + log r. "token_*" judges each token; "seq_*" a response by the sum,
    mean or maximum over its tokens. "seq_mean_k1" is geometric rejection (Geo-RS). What is left out
    still counts in the means of loss_agg, so "token_*" does not go with "seq-mean-token-mean".
    """

    rejection_bounds: Pair = Field(default=ANY_GAP)
    """The least and the most that rejection keeps.

    Of k1: of the ratio exp(k1), in Geo-RS 0.999 and 1.001. Of k2 and k3: of the value; the first is
    0 then.
    """

    old_log_prob: Literal["actor", "rollout"] = "actor"
    """The old probability in the clipped ratio. See rollout/README.md, "Old log-probabilities".

    "actor": the trained weights compute it in a pass of its own before they change; "rollout": the
    engine gave it while sampling, which saves that pass.
    """

    router_replay: Literal["off", "R2", "R3"] = "off"
    """Of a model with experts: the experts that the updates of a step send its tokens to.

    "off": those that the weights choose as they are; "R2": those of the pass before the updates,
    which computes the old log-probabilities; "R3": those that the engine sampled with, in that pass
    and in the updates. See verl/README.md, "Experts".
    """

    kl_coef: NonNegative = 0.0
    """Weight of the divergence from the initial weights; 0: none, as in the paper."""

    kl_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """The estimate of that divergence from a token's log-probabilities, d = log p - log p_initial.

    "k1": d; "k2": d^2 / 2; "k3": exp(-d) - 1 + d; "abs": |d|. In the loss k1 pulls on average
    nowhere, and k2's gradient is the divergence's. "k1+" and "k3+" are k1 and k3 with k2's
    gradient.
    """

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence goes: into the loss, or off each token's reward (PPO, REINFORCE++)."""

    @property
    def clip_c(self) -> float:
        """The bound of the dual clip."""
        return self.clip[2] if len(self.clip) == 3 else CLIP_C

    @property
    def compares_groups(self) -> bool:
        """Whether advantages need several responses to a prompt."""
        return self.name in IN_GROUPS

    @property
    def masks_responses(self) -> bool:
        return bool(self.mask)

    @model_validator(mode="after")
    def _check_pairs(self) -> Algorithm:
        low, high = self.importance_bounds
        wrong = [
            ("clip", min(self.clip) <= 0 or self.clip_c <= 1, "two numbers above 0, and perhaps one above 1"),
            ("tau", min(self.tau) <= 0, "two numbers above 0"),
            ("importance_bounds", not 0 <= low <= 1 <= high, "a number from 0 to 1, and one of at least 1"),
        ]
        for key, is_wrong, rule in wrong:
            if is_wrong:
                raise ValueError(f"algorithm.{key} = {getattr(self, key)}: give {rule}")
        return self

    @model_validator(mode="after")
    def _check_no_unused_settings(self) -> Algorithm:
        """Refuse a setting that the other settings leave without effect."""
        loss, name = f'algorithm.loss = "{self.loss}"', f'algorithm.name = "{self.name}"'
        off, weighs = 'algorithm.{} = "off"', self.importance_sampling != "off"
        idle = [
            ("clip", self.clip_c != CLIP_C and self.loss != "ppo", f"{loss}, whose ratio has no third bound"),
            ("tau", self.tau != TAU and self.loss != "sapo", loss),
            ("gamma", self.gamma != 1 and self.name not in ("ppo", "reinforce_plus_plus"), name),
            ("lam", self.lam != 1 and self.name != "ppo", name),
            ("importance_bounds", self.importance_bounds[0] > 0 and not weighs, off.format("importance_sampling")),
            ("rejection_bounds", self.rejection_bounds != ANY_GAP and self.rejection == "off", off.format("rejection")),
            ("kl_type", self.kl_type != "k3" and not self.kl_coef, "algorithm.kl_coef = 0"),
            ("kl_in", self.kl_in != "loss" and not self.kl_coef, "algorithm.kl_coef = 0"),
        ]
        for key, in_vain, because in idle:
            if in_vain:
                raise ValueError(
                    f"algorithm.{key} = {getattr(self, key)} does nothing with {because}. Leave it out, or change that"
                )
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> Algorithm:
        if self.router_replay == "R2" and self.old_log_prob == "rollout":
            raise ValueError(
                'algorithm.router_replay = "R2" repeats the experts of the pass that algorithm.old_log_prob = '
                '"rollout" leaves out. Use "R3", or old_log_prob = "actor"'
            )
        return self

    @model_validator(mode="after")
    def _loss_rules(self) -> Algorithm:
        if self.loss == "sapo" and self.loss_agg != "seq-mean-token-mean":
            raise ValueError(
                f'algorithm.loss = "sapo" is a mean over responses of their means, and algorithm.loss_agg = '
                f'"{self.loss_agg}". Set it to "seq-mean-token-mean"'
            )
        if self.kl_in == "reward" and self.kl_type.endswith("+"):
            raise ValueError(
                f'algorithm.kl_type = "{self.kl_type}" has another gradient than "{self.kl_type[0:2]}", and a reward '
                'has none (algorithm.kl_in = "reward"). Leave out the +'
            )
        if self.old_log_prob == "rollout" and (self.importance_sampling != "off" or self.rejection != "off"):
            self._check_engines_ratio()
        return self

    def _check_engines_ratio(self) -> None:
        """With these settings verl computes weights and rejection in a loss of its own."""
        what = "importance_sampling" if self.importance_sampling != "off" else "rejection"
        given = f'algorithm.old_log_prob = "rollout" with algorithm.{what} = "{getattr(self, what)}"'
        if self.loss != "ppo":
            raise ValueError(
                f'{given} is a loss of its own, and algorithm.loss = "{self.loss}". Set old_log_prob = "actor"'
            )
        if self.masks_responses:
            raise ValueError(
                f"{given} fails on a micro-batch of which algorithm.mask = {json.dumps(self.mask)} leaves nothing. "
                'Set old_log_prob = "actor"'
            )

    @model_validator(mode="after")
    def _rejection_rules(self) -> Algorithm:
        if self.rejection == "off":
            return self
        given = f'algorithm.rejection = "{self.rejection}"'
        ratio, (low, high) = self.rejection.endswith("k1"), self.rejection_bounds
        if ratio and not 0 < low <= 1 <= high:
            raise ValueError(
                f"{given} keeps ratios between algorithm.rejection_bounds = {self.rejection_bounds}. Set the first "
                "above 0 and at most 1, the second to at least 1"
            )
        if not ratio and (low or high <= 0):
            raise ValueError(
                f"{given} has an upper bound alone, and algorithm.rejection_bounds = {self.rejection_bounds}. Set the "
                "first to 0 and the second above 0"
            )
        self._check_rejected_tokens(given)
        return self

    def _check_rejected_tokens(self, given: str) -> None:
        if not self.rejection.startswith("token"):
            return
        instead = (
            'Take a rejection of whole responses ("seq_*"), or algorithm.importance_sampling = "token" with '
            "a lower one of importance_bounds, which leaves tokens out by a weight of 0"
        )
        if self.loss_agg == "seq-mean-token-mean":
            raise ValueError(
                f'{given} with algorithm.loss_agg = "{self.loss_agg}" would divide by the tokens that are left of a '
                f"response, and rejected tokens count in the means. {instead}"
            )
        if self.loss == "gspo":
            raise ValueError(
                f'{given} with algorithm.loss = "gspo" would take the ratio of a response over the tokens that are '
                f"left of it. {instead}"
            )
        if self.name in ("ppo", "reinforce_plus_plus"):
            raise ValueError(
                f'{given} with algorithm.name = "{self.name}" would lose a reward whose token is rejected. Take a '
                'rejection of whole responses ("seq_*"), or another name'
            )


class Critic(Section):
    """PPO's value model: model.path with a new head, in the actor's layout.

    It uses the settings of [optim], except for its own lr.
    """

    lr: LearningRate = 1e-5
    """The critic's highest learning rate, in place of optim.lr."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The first so many steps train the critic alone; the actor's schedule starts after them."""
