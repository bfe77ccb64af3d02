"""The schema of a run: one complete TOML file, strict, read once, written back beside the run.

Token counts end in ``_tokens``, times in ``_s``, sizes in ``_mb``. A value that comes from the paper or from a
measured fact says so in the TOML file, where it is chosen, not here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import Field, ValidationError, model_validator

from retool_mcore.config_base import Every, Fraction, PositiveFloat, PositiveInt, Section
from retool_mcore.config_checkpoint import Checkpoint, check_saving
from retool_mcore.config_errors import explain
from retool_mcore.config_rl import Algorithm, Critic, RlTrain, Rollout, Validation, sampled_as_rollout, train_gpus
from retool_mcore.errors import ConfigError

MAX_VERL_OVERRIDES = 10


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    root: str = "runs"  # the run's folder is root/name
    seed: int = 0
    platform: Literal["cpu", "cuda", "ascend"]

    @property
    def dir(self) -> Path:
        return Path(self.root) / self.name


class Cluster(Section):
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt  # on platform cpu: processes per node

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Model(Section):
    path: str  # a local Hugging Face directory, or a hub name
    dtype: Literal["bfloat16", "float32"]  # float32 on platform cpu only
    bridge: Literal["mbridge", "megatron-bridge"] = "mbridge"
    fp8: Literal["off", "tensorwise", "blockwise"] = "off"  # matrix products of training; Transformer Engine's recipe


class Parallel(Section):
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1  # model chunks of one pipeline stage, interleaved: a smaller bubble, more messages
    cp: PositiveInt = 1
    ep: PositiveInt = 1  # experts of a mixture-of-experts model are spread over so many data-parallel ranks
    sequence_parallel: bool = True  # splits norms and dropout over the tp group; nothing to split at tp = 1

    @property
    def model_parallel(self) -> int:
        return self.tp * self.pp * self.cp


class Memory(Section):
    """What is kept, recomputed, shrunk or moved to the host, so that a model fits. Each costs time: see perf/LOG.md.

    recompute            "none"; "selective": norms and what Megatron finds cheap; "full": whole layers; "auto": whole
                         layers, only in micro-batches longer than train.micro_batch_tokens, which one sequence may
                         exceed; as many as bring it back to the memory of such a one
    recompute_layers     with "full": so many layers of each pipeline stage; 0: all of them
    fused_cross_entropy  no float32 copy of the logits: 16 k tokens of a 152 k vocabulary are 10 GB in each of several
    adam_states          bytes a parameter for master weight and two moments. "float32": 12; "compact": 10, the master
                         weight as the bfloat16 one and its 16 missing bits, exact; "bfloat16": 6, moments in bfloat16
    optimizer_on_cpu     fraction of the optimizer's states that live and are updated on the host
    offload_idle         RL: the actor's weights and optimizer go to the host while the rollout engine works
    """

    recompute: Literal["none", "selective", "full", "auto"] = "none"
    recompute_layers: Annotated[int, Field(ge=0)] = 0
    fused_cross_entropy: bool = False
    adam_states: Literal["float32", "compact", "bfloat16"] = "float32"
    optimizer_on_cpu: Fraction = 0.0
    offload_idle: bool = False


class Optim(Section):
    lr: PositiveFloat
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "cosine", "linear"]
    # The schedule moves with every optimizer update, in every mode of RL, too; the first update has the first rate.
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the run's updates
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    clip_grad: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _min_below_lr(self) -> Optim:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}")
        return self


class SftData(Section):
    train_file: str  # parquet, rows {messages, tools}
    val_file: str
    max_length_tokens: PositiveInt
    allow_overlap: bool = False  # True: validate on problems that are trained on, more than a tenth of them


class SftTrain(Section):
    steps: PositiveInt
    global_batch: PositiveInt  # sequences per optimizer step, over all data-parallel ranks
    micro_batch_tokens: PositiveInt  # budget of one packed micro-batch on one rank
    val_every_steps: Every


class RlData(Section):
    train_file: str  # parquet in verl's schema: prompt, data_source, reward_model, extra_info
    max_prompt_tokens: PositiveInt
    allow_overlap: bool = False  # as in SftData


class Sandbox(Section):
    where: list[str] = Field(default=["local"], min_length=1)  # "local", or URLs that speak SandboxFusion
    min_level: Literal["gvisor", "namespaces", "landlock", "rlimits"] = "rlimits"
    workers: PositiveInt = 2  # executions at the same time, per node
    run_timeout_s: PositiveFloat = 10.0
    memory_limit_mb: PositiveInt = 1024


class Reward(Section):
    """The paper's +-1; what is below ``workers`` shapes it, is off by default and is logged as a part of its own."""

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


class RunConfig(Section):
    """What SFT and RL share. ``source`` names the file in every error."""

    source: str = Field(default="<memory>", exclude=True)
    run: Run
    cluster: Cluster
    model: Model
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    optim: Optim
    checkpoint: Checkpoint
    verl_overrides: dict[str, Any] = Field(default={})

    @property
    def max_sequence_tokens(self) -> int:
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def num_steps(self) -> int:
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def data_files(self) -> list[tuple[str, str]]:
        """(setting, path) of every file that is read, the training file first."""
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    def train_gpus(self) -> int:
        """Devices of [cluster] that train. Raises ValueError where the mode of an RL run leaves none."""
        return self.cluster.num_gpus

    @property
    def dp(self) -> int:
        return self.train_gpus() // self.parallel.model_parallel

    @model_validator(mode="after")
    def _shared_rules(self) -> RunConfig:
        p, c, gpus = self.parallel, self.cluster, self.train_gpus()
        if gpus % p.model_parallel:
            less = f" less {c.num_gpus - gpus} of rollout.gpus" if gpus < c.num_gpus else ""
            raise ValueError(
                f"parallel.tp * pp * cp = {p.tp} * {p.pp} * {p.cp} = {p.model_parallel} does not divide the "
                f"{gpus} GPUs of [cluster] ({c.nodes} nodes x {c.gpus_per_node}{less}). Lower one of them"
            )
        if self.memory.recompute_layers and self.memory.recompute != "full":
            raise ValueError(
                f"memory.recompute_layers = {self.memory.recompute_layers} counts whole layers, and memory.recompute = "
                f'"{self.memory.recompute}" recomputes none. Use "full", or leave it out'
            )
        if self.memory.fused_cross_entropy and p.tp > 1 and not p.sequence_parallel:
            raise ValueError(
                f"memory.fused_cross_entropy with parallel.tp = {p.tp} needs parallel.sequence_parallel = true: the "
                "gradient of the last hidden states is summed over the ranks there"
            )
        if p.vpp > 1 and p.pp == 1:
            raise ValueError(f"parallel.vpp = {p.vpp} interleaves the chunks of pipeline stages, and parallel.pp = 1")
        if self.dp % p.ep:
            raise ValueError(f"parallel.ep = {p.ep} does not divide the {self.dp} data-parallel ranks")
        if self.model.dtype == "float32" and self.run.platform != "cpu":
            raise ValueError(
                f'model.dtype = "float32" runs on platform "cpu" only, and run.platform = "{self.run.platform}". '
                'Use "bfloat16"'
            )
        check_saving(self.checkpoint, self.memory.optimizer_on_cpu)
        if len(self.verl_overrides) > MAX_VERL_OVERRIDES:
            raise ValueError(
                f"[verl_overrides] has {len(self.verl_overrides)} keys, at most {MAX_VERL_OVERRIDES} are allowed. "
                "Ask for a setting of our own instead"
            )
        return self

    def to_toml(self) -> str:
        """The resolved run as TOML; reading it back gives an equal configuration."""
        return tomli_w.dumps(self.model_dump())


class SftConfig(RunConfig):
    data: SftData
    train: SftTrain

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_length_tokens

    @property
    def num_steps(self) -> int:
        return self.train.steps

    @property
    def data_files(self) -> list[tuple[str, str]]:
        return [("data.train_file", self.data.train_file), ("data.val_file", self.data.val_file)]

    @model_validator(mode="after")
    def _sft_rules(self) -> SftConfig:
        if self.train.global_batch % self.dp:
            raise ValueError(
                f"train.global_batch = {self.train.global_batch} is not a multiple of the {self.dp} data-parallel "
                f"ranks ({self.cluster.num_gpus} GPUs / {self.parallel.model_parallel} per model)"
            )
        budget = self.train.micro_batch_tokens * self.parallel.cp
        if self.data.max_length_tokens > budget and self.memory.recompute != "auto":
            raise ValueError(
                f"data.max_length_tokens = {self.data.max_length_tokens} does not fit a micro-batch of "
                f"train.micro_batch_tokens * parallel.cp = {budget} tokens. Raise the one, lower the other, or let "
                'longer ones be recomputed with memory.recompute = "auto"'
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


ConfigT = TypeVar("ConfigT", bound=RunConfig)


def load_config(kind: type[ConfigT], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML run file, apply ``section.key=value`` overrides, validate.

    Values of overrides are TOML (``train.steps=5``, ``sandbox.where=["local"]``); bare words are strings.
    Raises ConfigError naming the file, the key, the value and the rule.
    """
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return build_config(kind, tree, str(path), overrides)


def build_config(kind: type[ConfigT], tree: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> ConfigT:
    """``load_config`` of a tree that is no file; ``source`` is named in errors."""
    for override in overrides:
        _apply(tree, override)
    tree["source"] = source
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(kind, error, source, overrides)) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if parts[0] == "verl_overrides":
        parts = ["verl_overrides", ".".join(parts[1:])]
    if not sign or len(parts) != 2 or not all(parts):
        raise ConfigError(f"{override!r} is not of the form section.key=value, for example train.steps=100")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tree.setdefault(parts[0], {})
    if not isinstance(table, dict):
        raise ConfigError(f"{override!r}: {parts[0]} is not a section of the configuration")
    table[parts[1]] = value
