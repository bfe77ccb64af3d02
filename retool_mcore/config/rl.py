"""Reinforcement learning: its sections (sampling, reward, training) and the rules between them."""

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
    prompts_per_step: PositiveInt  # in mode "async": trained on between two weight syncs
    mini_batch_prompts: PositiveInt  # prompts per optimizer update; prompts_per_step / this = updates per step
    micro_batch_tokens: PositiveInt
    mode: Literal["sync", "partial_rollout", "async"] = "sync"  # see rollout/README.md, "Scheduling"
    # The next three settings apply to both modes other than "sync". max_staleness limits the weight
    # syncs between the start of a prompt and the step that trains on it. when_stale: "drop" samples
    # another prompt in place of an older one, "wait" delays the step until the prompt is finished.
    prefetch_batches: PositiveFloat = 1.0  # batches of prompts in flight beyond the one that the step waits for
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
    calls_per_turn: Literal["first", "all"] = "first"  # cut a turn at its first call, or run all of its calls
    max_tool_output_tokens: PositiveInt = 512  # per result; a longer one is cut in the middle, and the model is told
    max_tool_s: PositiveFloat = 300.0  # interpreter time per trajectory; beyond it the trajectory ends
    max_malformed_calls: PositiveInt = 3  # in a row; then the trajectory ends
    max_refill_batches: PositiveInt = 10  # per step, in batches of prompts: replace filtered, failed or stale prompts
    max_outage_s: PositiveFloat = 60.0  # how long a call is retried while the sandbox is away
    max_dropped_fraction: Fraction = 0.02  # of a batch, lost to sandbox or engine outages; above it the run stops
    record_groups: Annotated[int, Field(ge=0)] = 2  # groups per step and per validation written to trajectories/
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    gpus: Annotated[int, Field(ge=0)] = 0  # GPUs of [cluster] that serve rollouts and do not train; train.mode "async"
    engine_tp: PositiveInt = 1
    engine_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    max_running_requests: PositiveInt = 64
    agent_workers: PositiveInt = 1
    engine_args: dict[str, Any] = Field(default={})  # the engine's own settings: attention_backend = "triton"


class Validation(Section):
    """When and how a run's own validation and `retool eval` score the policy on held-out problems.

    When n, temperature or top_p is left out, it is group_size, temperature or top_p of [rollout].
    """

    files: list[str] = Field(min_length=1)  # parquet, as data.train_file; problems are numbered across all files
    every: Every  # in steps; also after the last one; 0: never
    n: PositiveInt  # samples per problem
    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0: always the likeliest token
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


def sampled_as_rollout(tree: Any) -> Any:
    """Fill the sampling settings that [validation] leaves out from [rollout], in a run's tree."""
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
    """GRPO, PPO with a critic, and the parts of DAPO, all in verl's own implementations.

    DAPO is GRPO with clip_high above clip_low, loss_agg "token-mean", filter_groups and
    reward.overlong_buffer_tokens.

    filter_groups         replace a prompt whose answers are all right or all wrong by another one
    importance_sampling   weight a token's loss by its probability under the trained weights over
                          that under the engine that sampled it. "token": by its own ratio;
                          "sequence": by the product of the ratios over its response
    importance_threshold  upper bound of that weight
    old_log_prob          the old probability in the clipped ratio. "actor": the trained weights
                          compute it in a pass of its own before they change; "rollout": the engine
                          gave it while sampling, which saves that pass and needs one update per
                          step. See rollout/README.md, "Old log-probabilities"
    kl_coef               weight in the loss of the divergence from the initial weights; the paper
                          has none
    """

    name: Literal["grpo", "ppo"] = "grpo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    clip_c: PositiveFloat = 10.0
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    normalize_by_std: bool = True  # GRPO: divide a group's advantages by the standard deviation of its rewards
    filter_groups: bool = False
    importance_sampling: Literal["off", "token", "sequence"] = "off"
    importance_threshold: Annotated[float, Field(ge=1)] = 2.0
    old_log_prob: Literal["actor", "rollout"] = "actor"
    kl_coef: Annotated[float, Field(ge=0)] = 0.0


class Critic(Section):
    """PPO's value model: model.path with a new head, in the actor's layout.

    It uses the settings of [optim], except for its own lr.
    """

    lr: PositiveFloat = 1e-5
    clip_value: PositiveFloat = 0.5  # how far a value may move from its old one before its loss stops falling


class Sandbox(Section):
    where: list[str] = Field(default=["local"], min_length=1)  # "local", or URLs that speak SandboxFusion
    min_level: Literal["gvisor", "namespaces", "landlock", "rlimits"] = "rlimits"
    workers: PositiveInt = 2  # concurrent executions per node
    run_timeout_s: PositiveFloat = 10.0
    memory_limit_mb: PositiveInt = 1024


class Reward(Section):
    """The paper's +-1. Settings below ``workers`` shape it.

    Shaping is off by default, and each part of it is logged separately.
    """

    correct: float = 1.0
    wrong: float = -1.0
    timeout_s: PositiveFloat = 5.0  # per equivalence check; a check that takes longer counts as wrong
    workers: PositiveInt = 1
    call_bonus: Annotated[float, Field(ge=0)] = 0.0  # per call of a wrong response; 0.1 in the public recipe
    call_bonus_cap: float = -0.6  # the highest reward of a wrong response with its bonus
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
    """Count the GPUs that train.

    Raises ValueError when train.mode does not fit rollout.gpus, the cluster or max_staleness.
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
