"""Reinforcement learning: the sections [data], [train] and [reward], and rules between sections."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from retool_mcore.config.algorithm import Algorithm, Critic
from retool_mcore.config.base import Pair, PositiveFloat, PositiveInt, Section
from retool_mcore.config.files import parquet_files
from retool_mcore.config.sampling import Prompts, Rollout, SandboxSettings, Validation, copy_rollout_sampling
from retool_mcore.config.shared import RunConfig

# Metrics of every RL validation -> "max" or "min" if the name implies it, else "".
VALIDATION_METRICS = {
    "val/accuracy": "max",
    "val/groups/all_right": "max",
    "val/groups/all_wrong": "min",
    "val/reward/has_answer": "max",
    "val/reward/check_failed": "min",
    "val/behavior/code_ratio": "",
    "val/behavior/calls": "",
    "val/behavior/turns": "",
    "val/behavior/response_tokens": "",
}
SOURCE_ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<n>\d+)")


class RlData(Prompts):
    """The problems that RL samples responses for."""

    train_file: str
    """Parquet in verl's schema: prompt, data_source, reward_model, extra_info.

    A file, a folder of files, or a pattern such as "data/part-*.parquet".
    """

    allow_overlap: bool = False
    """Allow training on more than a tenth of the problems of a file in validation.files."""

    curriculum: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1: sample always-solved and never-solved prompts less often. 1: sample all equally.

    Each consecutive group whose answers are all right, or all wrong, halves the share of epochs
    that sample the prompt. A switch between the two resets the share to one half, and a mixed group
    to 1. This setting is the lowest share: 0.125 samples the prompt at least every eighth epoch.
    See docs/scheduling.md, "Curriculum".
    """


class RlTrain(Section):
    """How long RL trains, its batch sizes, and how sampling and training alternate or overlap."""

    steps: PositiveInt
    """Steps of the whole run. Each step trains on prompts_per_step prompts."""

    prompts_per_step: PositiveInt
    """Prompts that a step trains on; in mode "async", the prompts between two weight syncs."""

    mini_batch_prompts: PositiveInt
    """Prompts per optimizer update; updates per step = prompts_per_step / mini_batch_prompts."""

    micro_batch_tokens: PositiveInt
    """Token budget of a packed micro-batch on one rank, with or without a backward pass."""

    mode: Literal["sync", "partial_rollout", "async"] = "sync"
    """When a step starts to train, and on which devices. See docs/scheduling.md.

    "sync" waits for all responses of the step. "partial_rollout" trains on the responses that are
    ready; the others continue with the new weights. "async" does the same, but the engines have
    separate GPUs.
    """

    prefetch_batches: PositiveFloat = 1.0
    """Batches of prompts in flight beyond the one that the step waits for; not in mode "sync"."""

    max_staleness: dict[Literal["drop", "wait"], PositiveInt] = Field(default={"drop": 7}, min_length=1, max_length=1)
    """Maximum number of weight syncs between a prompt's start and its training; not in mode "sync".

    { drop = 7 } replaces an older prompt with another one. { wait = 7 } delays the step until the
    prompt is finished.
    """

    stall_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds without progress after which the run ends; 0: never.

    Progress is a sampled turn, a finished trajectory, a pass over a batch, an update, a step, a
    stage of the start, or a checkpoint. Before it ends, the run writes the stacks of its processes
    to logs/. `retool plan` and `retool preflight` compare this limit with the longest planned time
    without progress.
    """

    max_engine_restarts: Annotated[int, Field(ge=0)] = 3
    """Engine restarts allowed per start of the run. The next engine that dies ends the run.

    The step continues: requests wait or move to other engines, and the new engine gets the actor's
    weights before it samples. 0: replace none. See docs/engines.md.
    """

    @property
    def staleness_limit(self) -> int:
        return next(iter(self.max_staleness.values()))

    @property
    def when_stale(self) -> str:
        """What happens to prompts that become older: "drop" or "wait"."""
        return next(iter(self.max_staleness))

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates between two weight syncs."""
        return self.prompts_per_step // self.mini_batch_prompts


class Reward(Section):
    """The paper's rewards of +1 and -1, and settings that shape them.

    The shaping settings are call_bonus and those after it. They are off by default, and each part
    of the reward is logged separately.
    """

    function: str = ""
    """Your own scoring function, "module:name", instead of these; see reward/README.md."""

    answer: Pair = Field(default=[1.0, -1.0])
    """Reward if the answer is equivalent to the truth, and a lower one for any other response."""

    timeout_s: PositiveFloat = 5.0
    """CPU seconds per equivalence check. A check that takes longer counts as wrong."""

    workers: PositiveInt = 1
    """Processes that score responses. Each has two checkers."""

    call_bonus: Pair = Field(default=[0.0, -0.6])
    """Bonus per call of a wrong response, and the cap of its reward with the bonus.

    verl's ReTool recipe uses 0.1 and -0.6. A bonus of 0 turns it off.
    """

    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Last tokens of rollout.max_response_tokens over which a penalty rises from 0 to 1; 0: off."""

    require: list[Literal["format", "simplified"]] = Field(default=[])
    """Further conditions for the reward of a right answer.

    "format": the response has no malformed call. "simplified": the answer is about as simple as the
    truth (a number if the truth is one), not copied from the problem. See reward/README.md.
    """

    @model_validator(mode="after")
    def _check_own_function(self) -> Reward:
        fields = type(self).model_fields
        changed = [name for name, field in fields.items() if getattr(self, name) != field.default]
        for name in sorted({*changed} - {"function", "timeout_s", "workers"}) if self.function else ():
            raise ValueError(
                f'reward.{name} = {getattr(self, name)} has no effect with reward.function = "{self.function}", which '
                f"replaces the built-in reward. Leave reward.{name} out, or do the same in your function"
            )
        return self

    @model_validator(mode="after")
    def _check_reward_order(self) -> Reward:
        (right, wrong), (bonus, highest) = self.answer, self.call_bonus
        if wrong >= right:
            raise ValueError(
                f"reward.answer = {self.answer}: the first number, for a right answer, must be above the second"
            )
        if bonus < 0:
            raise ValueError(f"reward.call_bonus = {self.call_bonus}: the first number, per call, must be 0 or more")
        if bonus and not wrong < highest < right:
            raise ValueError(
                f"reward.call_bonus = {self.call_bonus}: the second number, the highest reward with the bonus, must "
                f"be between the two of reward.answer = {self.answer}"
            )
        return self


class RlConfig(RunConfig):
    data: RlData
    train: RlTrain
    rollout: Rollout
    validation: Validation
    sandbox: SandboxSettings = SandboxSettings()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()

    @model_validator(mode="before")
    @classmethod
    def _copy_rollout_sampling(cls, tree: Any) -> Any:
        return copy_rollout_sampling(tree)

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_steps(self) -> int:
        return self.train.steps

    @property
    def data_files(self) -> list[tuple[str, str]]:
        train = [("data.train_file", path) for path in parquet_files(self.data.train_file)]
        return [*train, *(("validation.files", path) for path in self.validation.files)]

    @property
    def validation_interval(self) -> tuple[str, int]:
        return "validation.every", self.validation.every

    @property
    def best_source(self) -> str:
        """The data_source in best.metric, or ""."""
        match = SOURCE_ACCURACY.fullmatch(self.best.name)
        return match["source"] if match else ""

    @property
    def validation_metrics(self) -> dict[str, str]:
        of_source = f"val-core/{self.best_source or 'SOURCE'}/acc/mean@{self.validation.n}"
        return VALIDATION_METRICS | {of_source: "max"}

    def train_gpus(self) -> int:
        return train_gpus(self.train, self.rollout, self.cluster.nodes, self.cluster.gpus_per_node)

    def serving_gpus(self) -> int:
        """Count the GPUs of the engines: separate ones, or all, shared with training."""
        return self.rollout.gpus or self.cluster.num_gpus

    @model_validator(mode="after")
    def _rl_rules(self) -> RlConfig:
        t, r, serving = self.train, self.rollout, self.serving_gpus()
        if self.algorithm.compares_within_groups and r.group_size < 2:
            raise ValueError(
                f'algorithm.name = "{self.algorithm.name}" compares the responses to a prompt, but '
                "rollout.group_size = 1. Use at least 2"
            )
        if self.data.curriculum < 1 and r.group_size < 2:
            raise ValueError(
                f"data.curriculum = {self.data.curriculum} needs groups of several responses, but "
                "rollout.group_size = 1. Use at least 2"
            )
        if self.algorithm.filter_groups and r.group_size < 2:
            raise ValueError(
                "algorithm.filter_groups needs groups of several responses, but rollout.group_size = 1. Use at least 2"
            )
        if t.prompts_per_step % t.mini_batch_prompts:
            raise ValueError(
                f"train.mini_batch_prompts = {t.mini_batch_prompts} does not divide "
                f"train.prompts_per_step = {t.prompts_per_step}"
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
                f"micro-batch of train.micro_batch_tokens * parallel.cp = {budget} tokens. Lower the first, raise the "
                'second, or recompute longer sequences with memory.recompute = "auto"'
            )
        if self.reward.overlong_buffer_tokens > r.max_response_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens = {self.reward.overlong_buffer_tokens} is above "
                f"rollout.max_response_tokens = {r.max_response_tokens}. The buffer is the end of a response; lower it"
            )
        if not r.tool and (self.reward.call_bonus[0] or "format" in self.reward.require):
            raise ValueError(
                'reward.call_bonus and "format" in reward.require need calls, but with rollout.tools = [] there are '
                "none. Leave them out"
            )
        return self

    @model_validator(mode="after")
    def _tracked_rules(self) -> RlConfig:
        r = self.rollout
        for key, value in (("rollout.record_groups", r.record_groups), ("run.trackers", self.run.trackers)):
            if r.tracked_trajectories and not value:
                raise ValueError(
                    f"rollout.tracked_trajectories = {r.tracked_trajectories} sends recorded groups to trackers, but "
                    f"{key} = {value}. Set {key}, or leave out tracked_trajectories"
                )
        return self

    @model_validator(mode="after")
    def _replay_rules(self) -> RlConfig:
        if self.algorithm.router_replay != "off" and self.memory.recompute == "auto":
            raise ValueError(
                f'algorithm.router_replay = "{self.algorithm.router_replay}" cannot be combined with '
                'memory.recompute = "auto": verl\'s replay needs the same recomputation in every micro-batch, but '
                '"auto" recomputes only in some. Use "full" or "none"'
            )
        return self

    @model_validator(mode="after")
    def _check_engine_mismatch(self) -> RlConfig:
        """Require a correction where engine and actor differ too much."""
        a = self.algorithm
        if a.importance_sampling != "off":
            return self
        if a.old_log_prob == "rollout" and self.model.fp8 != "off":
            raise ValueError(
                f'algorithm.old_log_prob = "rollout" with model.fp8 = "{self.model.fp8}": engine and actor differ '
                'too much to use the engine\'s log-probabilities alone. Set algorithm.importance_sampling = "token"'
            )
        for name in ("precision", "kv_cache"):
            if getattr(self.rollout, name) == "fp8":
                raise ValueError(
                    f'rollout.{name} = "fp8" changes the engine\'s probabilities, but '
                    f'algorithm.importance_sampling = "off" does not correct that. Set importance_sampling = "token", '
                    f'or {name} = "model"'
                )
        return self

    @model_validator(mode="after")
    def _check_sessions(self) -> RlConfig:
        """Require a session for each trajectory in flight, because each keeps its interpreter."""
        if not self.sandbox.sessions:
            return self
        t, r, nodes = self.train, self.rollout, self.cluster.nodes
        batches = 1.0 if t.mode == "sync" else 1.0 + t.prefetch_batches
        in_flight = math.ceil(t.prompts_per_step * batches) * r.group_size
        per_node = math.ceil(r.agent_workers / nodes)
        needed = math.ceil(in_flight / r.agent_workers) * per_node
        if self.sandbox.sessions < needed:
            raise ValueError(
                f"sandbox.sessions = {self.sandbox.sessions} per node is too few. Set at least {needed}: up to "
                f"{in_flight} trajectories are in flight, each keeps its interpreter to its end, and "
                f"rollout.agent_workers = {r.agent_workers} spreads them over {nodes} nodes. The number in "
                f"flight is train.prompts_per_step * rollout.group_size = {t.prompts_per_step} * {r.group_size}"
                f"{'' if t.mode == 'sync' else ', times 1 + train.prefetch_batches'}"
            )
        return self

    @model_validator(mode="after")
    def _rl_lora_rules(self) -> RlConfig:
        if self.lora.dropout:
            raise ValueError(
                f"lora.dropout = {self.lora.dropout} is for SFT only: RL compares an update's log-probabilities with "
                "those of passes without dropout. Set it to 0"
            )
        if self.lora.rank and self.algorithm.name == "ppo":
            raise ValueError(
                f'lora.rank = {self.lora.rank} with algorithm.name = "ppo" is not supported: the critic has no '
                'adapters and would train all its weights. Use an algorithm without a critic, such as "grpo", or '
                "lora.rank = 0"
            )
        return self

    @model_validator(mode="after")
    def _warm_up_rules(self) -> RlConfig:
        if self.critic.warmup_steps and self.algorithm.name != "ppo":
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} has no effect with algorithm.name = "
                f'"{self.algorithm.name}", which has no critic. Set it to 0, or name = "ppo"'
            )
        if self.critic.warmup_steps >= self.train.steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves no step of train.steps = {self.train.steps} "
                "to train the actor. Lower the first or raise the second"
            )
        return self


def train_gpus(train: RlTrain, rollout: Rollout, nodes: int, gpus_per_node: int) -> int:
    """Count the GPUs that train.

    Raises ValueError when train.mode does not fit rollout.gpus, the cluster or max_staleness.
    """
    if (train.mode == "async") != (rollout.gpus > 0):
        raise ValueError(
            f'train.mode = "{train.mode}" and rollout.gpus = {rollout.gpus} are incompatible: in mode "async" the '
            "engines need at least one GPU of [cluster]; in the other modes they share all GPUs with the trainer "
            "(rollout.gpus = 0). Change one of the two"
        )
    if rollout.gpus >= nodes * gpus_per_node:
        raise ValueError(
            f"rollout.gpus = {rollout.gpus} leaves no GPU for training: [cluster] has {nodes * gpus_per_node} "
            f"({nodes} nodes x {gpus_per_node}). Lower it"
        )
    if nodes > 1 and rollout.gpus % gpus_per_node:
        raise ValueError(
            f"rollout.gpus = {rollout.gpus} is not a multiple of cluster.gpus_per_node = {gpus_per_node}. With "
            f"{nodes} nodes, rollouts and training each need whole nodes"
        )
    if train.mode != "sync" and train.prefetch_batches > train.staleness_limit:
        raise ValueError(
            f"train.prefetch_batches = {train.prefetch_batches} starts prompts more than train.max_staleness = "
            f"{train.staleness_limit} steps before they are trained on. Lower the first or raise the second"
        )
    return nodes * gpus_per_node - rollout.gpus
