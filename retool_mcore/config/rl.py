"""Reinforcement learning: how responses are sampled, scored and learnt from, and the rules between
the sections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from retool_mcore.config.base import Every, Fraction, PositiveFloat, PositiveInt, Section
from retool_mcore.config.shared import RunConfig


class RlData(Section):
    train_file: str  # parquet in verl's schema: prompt, data_source, reward_model, extra_info
    max_prompt_tokens: PositiveInt
    allow_overlap: bool = False  # as in SftData


class RlTrain(Section):
    steps: PositiveInt
    prompts_per_step: PositiveInt  # mode "async": also how many are learnt from between two weight syncs
    mini_batch_prompts: PositiveInt  # prompts per optimizer update; prompts_per_step / this = updates a step
    micro_batch_tokens: PositiveInt
    mode: Literal["sync", "partial_rollout", "async"] = "sync"  # see rollout/README.md, "Scheduling"
    # # Of both modes that are not "sync". max_staleness: weight syncs that may lie between a
    # prompt's start and the step # that learns from it; when_stale: another prompt takes the place
    # of an older one, or no step comes before it.
    prefetch_batches: PositiveFloat = 1.0  # batches of prompts in flight beyond the one waited for
    max_staleness: PositiveInt = 7
    when_stale: Literal["drop", "wait"] = "drop"

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates between two weight syncs."""
        return self.prompts_per_step // self.mini_batch_prompts


class Rollout(Section):
    """One multi-turn rollout. ``max_response_tokens`` includes interpreter output."""

    protocol: str = "hermes"  # how calls are written: one of rollout.protocol.PROTOCOLS
    tool: bool = True  # False: text only, the baseline of the paper's comparison
    group_size: PositiveInt  # responses per prompt, GRPO's G
    max_turns: PositiveInt = 8
    max_response_tokens: PositiveInt
    calls_per_turn: Literal["first", "all"] = "first"  # a turn is cut at its first call, or all of its calls are run
    max_tool_output_tokens: PositiveInt = 512  # of one result: more is cut in the middle, and the model is told
    max_tool_s: PositiveFloat = 300.0  # run time of the interpreter over a whole trajectory; then it ends
    max_malformed_calls: PositiveInt = 3  # in a row; then the trajectory ends
    max_refill_batches: PositiveInt = 10  # batches of prompts sampled anew for one step: filtered, failed, too old
    max_outage_s: PositiveFloat = 60.0  # a call is tried again for so long while the sandbox is away
    max_dropped_fraction: Fraction = 0.02  # of a batch, by sandbox or engine outages; above it the run stops
    record_groups: Annotated[int, Field(ge=0)] = 2  # of a step, and of a validation, written to trajectories/
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    gpus: Annotated[int, Field(ge=0)] = 0  # of [cluster]: so many serve rollouts and do not train; train.mode "async"
    engine_tp: PositiveInt = 1
    engine_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    max_running_requests: PositiveInt = 64
    agent_workers: PositiveInt = 1
    engine_args: dict[str, Any] = Field(default={})  # the engine's own, by its names: attention_backend = "triton"


class Validation(Section):
    """When the policy is scored on held-out problems, and how: of a run's own validation and of
    `retool eval`.

    n, temperature and top_p are [rollout]'s group_size, temperature and top_p where they are left
    out.
    """

    files: list[str] = Field(min_length=1)  # parquet, as data.train_file; problems are counted through all of them
    every: Every  # steps; also after the last; 0: never
    n: PositiveInt  # samples of each problem
    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0: the likeliest token, always
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


def sampled_as_rollout(tree: Any) -> Any:
    """A run's tree in which [validation] says how it samples, by what [rollout] says where it says
    nothing itself.
    """
    if not isinstance(tree, dict):
        return tree
    sections = cast("dict[str, Any]", tree)
    rollout, validation = sections.get("rollout"), sections.get("validation")
    if not (isinstance(rollout, dict) and isinstance(validation, dict)):
        return sections
    sampling, own = cast("dict[str, Any]", rollout), cast("dict[str, Any]", validation)
    of_rollout = {"n": "group_size", "temperature": "temperature", "top_p": "top_p"}
    given = {name: sampling[theirs] for name, theirs in of_rollout.items() if theirs in sampling}
    return {**sections, "validation": {**given, **own}}


class Algorithm(Section):
    """GRPO, PPO with a critic, and DAPO's parts, all by verl's own implementations.

    DAPO is GRPO with clip_high above clip_low, loss_agg "token-mean", filter_groups and
    reward.overlong_buffer_tokens.

    filter_groups         another prompt takes the place of one whose answers are all right or all wrong
    importance_sampling   a token's loss is weighted by how much likelier the trained weights make it than the engine
                          that sampled it. "token": by its own ratio; "sequence": by the product over its response
    importance_threshold  a weight is at most this
    old_log_prob          "actor": what the clipped ratio is taken to is computed anew by the trained weights before
                          they change; "rollout": it is what the engine gave while it sampled, which saves that pass
                          where a step is one update. See rollout/README.md, "Old log-probabilities"
    kl_coef               weight of the divergence from the first weights, in the loss; the paper has none
    """

    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    clip_c: PositiveFloat = 10.0
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    normalize_by_std: bool = True  # GRPO: a group's advantages are divided by the deviation of its rewards
    filter_groups: bool = False
    importance_sampling: Literal["off", "token", "sequence"] = "off"
    importance_threshold: Annotated[float, Field(ge=1)] = 2.0
    old_log_prob: Literal["actor", "rollout"] = "actor"
    kl_coef: Annotated[float, Field(ge=0)] = 0.0


class Critic(Section):
    """PPO's value model: of the actor's shape and layout, from model.path with a new head, with
    [optim] but its lr.
    """

    lr: PositiveFloat = 1e-5
    clip_value: PositiveFloat = 0.5  # a value may move so far from its old one before its loss stops to fall


class Sandbox(Section):
    where: list[str] = Field(default=["local"], min_length=1)  # "local", or URLs that speak SandboxFusion
    min_level: Literal["gvisor", "namespaces", "landlock", "rlimits"] = "rlimits"
    workers: PositiveInt = 2  # executions at the same time, per node
    run_timeout_s: PositiveFloat = 10.0
    memory_limit_mb: PositiveInt = 1024


class Reward(Section):
    """The paper's +-1; what is below ``workers`` shapes it, is off by default and is logged as a
    part of its own.
    """

    correct: float = 1.0
    wrong: float = -1.0
    timeout_s: PositiveFloat = 5.0  # of one equivalence check; a check that takes longer counts as wrong
    workers: PositiveInt = 1
    call_bonus: Annotated[float, Field(ge=0)] = 0.0  # for each call of a wrong response; the public recipe's is 0.1
    call_bonus_cap: float = -0.6  # what a wrong response can be worth with its bonus
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0  # the last so many of max_response_tokens cost up to 1
    require_format: bool = False  # True: a right answer counts only when no call of its response was malformed

    @model_validator(mode="after")
    def _right_is_worth_most(self) -> Reward:
        if self.wrong >= self.correct:
            raise ValueError(f"reward.wrong = {self.wrong} is not below reward.correct = {self.correct}")
        if self.call_bonus and not self.wrong < self.call_bonus_cap < self.correct:
            raise ValueError(
                f"reward.call_bonus_cap = {self.call_bonus_cap} is not between reward.wrong = {self.wrong} and "
                f"reward.correct = {self.correct}, so reward.call_bonus = {self.call_bonus} would do nothing, or pay "
                "wrong answers like right ones"
            )
        return self


class RlConfig(RunConfig):
    data: RlData
    train: RlTrain
    rollout: Rollout
    validation: Validation
    sandbox: Sandbox = Sandbox()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()

    @model_validator(mode="before")
    @classmethod
    def _validation_samples_as_rollout(cls, tree: Any) -> Any:
        return sampled_as_rollout(tree)

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_steps(self) -> int:
        return self.train.steps

    @property
    def data_files(self) -> list[tuple[str, str]]:
        return [("data.train_file", self.data.train_file), *(("validation.files", p) for p in self.validation.files)]

    def train_gpus(self) -> int:
        return train_gpus(self.train, self.rollout, self.cluster.nodes, self.cluster.gpus_per_node)

    @model_validator(mode="after")
    def _rl_rules(self) -> RlConfig:
        t, r, serving = self.train, self.rollout, self.rollout.gpus or self.cluster.num_gpus
        if self.algorithm.name == "grpo" and r.group_size < 2:
            raise ValueError("rollout.group_size = 1 gives GRPO no group to compare within. Use at least 2")
        if self.algorithm.filter_groups and r.group_size < 2:
            raise ValueError("algorithm.filter_groups needs groups to compare within, and rollout.group_size = 1")
        if t.prompts_per_step % t.mini_batch_prompts:
            raise ValueError(
                f"train.mini_batch_prompts = {t.mini_batch_prompts} does not divide "
                f"train.prompts_per_step = {t.prompts_per_step}"
            )
        if self.algorithm.old_log_prob == "rollout":
            if t.updates_per_step > 1:
                raise ValueError(
                    f'algorithm.old_log_prob = "rollout" is for one update a step, and train.prompts_per_step = '
                    f"{t.prompts_per_step} / train.mini_batch_prompts = {t.mini_batch_prompts} makes "
                    f'{t.updates_per_step}. Use "actor", or make the two equal'
                )
            if self.model.fp8 != "off" and self.algorithm.importance_sampling == "off":
                raise ValueError(
                    f'algorithm.old_log_prob = "rollout" with model.fp8 = "{self.model.fp8}": engine and actor differ '
                    'too much for the engine\'s log-probabilities alone. Set algorithm.importance_sampling = "token"'
                )
        if t.mini_batch_prompts * r.group_size % self.dp:
            raise ValueError(
                f"train.mini_batch_prompts * rollout.group_size = {t.mini_batch_prompts} * {r.group_size} = "
                f"{t.mini_batch_prompts * r.group_size} responses do not divide over {self.dp} data-parallel ranks"
            )
        if serving % r.engine_tp:
            raise ValueError(
                f"rollout.engine_tp = {r.engine_tp} does not divide the {serving} GPUs that serve rollouts"
            )
        budget = t.micro_batch_tokens * self.parallel.cp
        if self.max_sequence_tokens > budget and self.memory.recompute != "auto":
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_response_tokens = {self.max_sequence_tokens} does not fit a "
                f"micro-batch of train.micro_batch_tokens * parallel.cp = {budget} tokens. Raise the one, lower the "
                'other, or let longer ones be recomputed with memory.recompute = "auto"'
            )
        if self.reward.overlong_buffer_tokens > r.max_response_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens = {self.reward.overlong_buffer_tokens} is longer than "
                f"rollout.max_response_tokens = {r.max_response_tokens}, whose end it is"
            )
        if not r.tool and (self.reward.call_bonus or self.reward.require_format):
            raise ValueError(
                "reward.call_bonus and reward.require_format judge calls, and rollout.tool = false leaves none. Set "
                "reward.call_bonus = 0.0 and reward.require_format = false"
            )
        return self


def train_gpus(train: RlTrain, rollout: Rollout, nodes: int, gpus_per_node: int) -> int:
    """Devices that train. Raises ValueError where train.mode fits neither them nor its own bound on
    staleness.
    """
    if (train.mode == "async") != (rollout.gpus > 0):
        raise ValueError(
            f'train.mode = "{train.mode}" and rollout.gpus = {rollout.gpus} exclude each other: the engines of mode '
            '"async" have at least one GPU for themselves, those of the other modes share all GPUs with the trainer '
            "(rollout.gpus = 0). Change one of the two"
        )
    if rollout.gpus >= nodes * gpus_per_node:
        raise ValueError(
            f"rollout.gpus = {rollout.gpus} leaves none of the {nodes * gpus_per_node} GPUs of [cluster] "
            f"({nodes} nodes x {gpus_per_node}) to train on. Lower it"
        )
    if nodes > 1 and rollout.gpus % gpus_per_node:
        raise ValueError(
            f"rollout.gpus = {rollout.gpus} is not a multiple of cluster.gpus_per_node = {gpus_per_node}: of "
            f"{nodes} nodes, rollouts and training each take whole ones"
        )
    if train.mode != "sync" and train.prefetch_batches > train.max_staleness:
        raise ValueError(
            f"train.prefetch_batches = {train.prefetch_batches} starts prompts more than train.max_staleness = "
            f"{train.max_staleness} steps before the one that learns from them. Lower the one or raise the other"
        )
    return nodes * gpus_per_node - rollout.gpus
