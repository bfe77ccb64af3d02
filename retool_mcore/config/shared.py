"""The sections that SFT and RL share, and the rules between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BeforeValidator, Field, model_validator

from retool_mcore.config.base import Fraction, LearningRate, Pair, PositiveFloat, PositiveInt, Section
from retool_mcore.config.experts import Experts
from retool_mcore.config.explain import NAME
from retool_mcore.config.lora import Lora
from retool_mcore.config.model import Model
from retool_mcore.config.saving import Best, Checkpoint, check_saving

MAX_VERL_OVERRIDES = 10
RECOMPUTE = ("none", "full", "auto")
CONFIG_FILE = "config.toml"  # in a run's folder
FORMAT_FILE = "prompt_format.json"  # how the run renders problems; in an export, too
END_OF_TURN = "end_of_turn"  # key in FORMAT_FILE: the token that ends a model turn, {token, id}
DATE = "date"  # key in FORMAT_FILE: the date that templates insert, such as 2026-11-29


class Run(Section):
    """The run's name, its folder, and the kind of machine that it needs."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the run and its folder: a letter or a digit, then letters, digits, ".", "_", "-"."""

    root: str = "runs"
    """Folder of all runs. The folder of this run is root/name."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds the order of the data and the random numbers of trainer and engines.

    docs/scheduling.md, "Seeds", lists what is then reproducible.
    """

    platform: Literal["cpu", "cuda", "ascend"]
    """The kind of machine: a CPU, NVIDIA GPUs or Ascend NPUs."""

    trackers: list[Literal["tensorboard", "wandb", "swanlab", "mlflow"]] = Field(default=["tensorboard"])
    """Trackers that get the metrics in addition to metrics.jsonl, each in a folder of the run.

    "wandb", "swanlab" and "mlflow" are extras of the package. They read servers and keys from their
    own environment variables. []: none.
    """

    @property
    def dir(self) -> Path:
        return Path(self.root) / self.name

    @property
    def config_file(self) -> Path:
        """Absolute path of the run's resolved settings."""
        return self.dir.absolute() / CONFIG_FILE


class Cluster(Section):
    """The machines of the run. All must be identical."""

    nodes: PositiveInt = 1
    """Number of machines."""

    gpus_per_node: PositiveInt
    """GPUs or NPUs per node, one process each. On platform cpu: processes per node."""

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Parallel(Section):
    """How one model is distributed over devices.

    The number of training devices divided by tp * pp * cp is the number of data-parallel ranks.
    """

    tp: PositiveInt = 1
    """Tensor parallel size: ranks that split each layer's matrices.

    They also split the tokens in norms and dropout.
    """

    pp: PositiveInt = 1
    """Pipeline parallel size: stages that the layers are divided into."""

    vpp: PositiveInt = 1
    """Interleaved model chunks per pipeline stage. More chunks: smaller bubble, more sends."""

    cp: PositiveInt = 1
    """Context parallel size: ranks that split the tokens of each sequence."""

    ep: PositiveInt = 1
    """Expert parallel size: ranks that split the experts of an MoE model."""

    etp: Annotated[int, Field(ge=0)] = 0
    """Tensor parallel size of an expert; 0: equal to tp. etp * ep must divide the ranks of a stage.

    1 keeps small experts whole when tp is larger, and leaves more ranks to ep.
    """

    @property
    def model_parallel(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp


def _level_or_layers(value: Any) -> Any:
    if value in RECOMPUTE or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    known = ", ".join(map(json.dumps, RECOMPUTE))
    raise ValueError(
        f"Unknown memory.recompute = {json.dumps(value)}. Choose one of {known}, or a number of layers above 0"
    )


class Memory(Section):
    """Ways to make the model fit: recomputation, compression and offloading.

    Each setting costs time: see perf/LOG.md.
    """

    recompute: Annotated[Literal["none", "full", "auto"] | int, BeforeValidator(_level_or_layers)] = "none"
    """Activations to recompute in the backward pass instead of keeping them.

    "full": whole layers. A number: that many layers of each pipeline stage. "auto": whole layers,
    but only in micro-batches that exceed train.micro_batch_tokens because of one long sequence. As
    many layers are recomputed as keep the memory within that of a micro-batch of
    train.micro_batch_tokens.
    """

    fused_cross_entropy: bool = False
    """Avoid float32 copies of the logits.

    Otherwise there are several. Each takes 10 GB for 16 k tokens and a vocabulary of 152 k.
    """

    adam_states: Literal["float32", "compact", "bfloat16"] = "float32"
    """Storage of Adam's master weight and two moments, in bytes per parameter.

    "float32": 12. "compact": 10; the master weight is the bfloat16 weight plus its 16 missing bits,
    which is exact. "bfloat16": 6, with bfloat16 moments.
    """

    optimizer_on_cpu: Fraction = 0.0
    """Fraction of the optimizer states that the host keeps and updates."""

    offload_idle: bool = False
    """RL: offload the actor's weights and optimizer to the host while the rollout engine works."""

    @property
    def recomputes_layers(self) -> bool:
        """Whether each micro-batch recomputes whole layers."""
        return self.recompute == "full" or self.recomputed_layers > 0

    @property
    def recomputed_layers(self) -> int:
        """The number of layers per pipeline stage in recompute; 0 if it is not a number."""
        return self.recompute if isinstance(self.recompute, int) else 0


class Optim(Section):
    """Adam and its learning rate.

    The schedule advances with every optimizer update, in all modes of RL. The first update uses the
    schedule's first rate.
    """

    lr: LearningRate
    """Peak learning rate, reached after the warm-up."""

    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Final rate of the schedules "cosine" and "linear"; at most lr."""

    schedule: Literal["constant", "cosine", "linear"]
    """After the warm-up the rate stays at lr, or decays to min_lr along a cosine or a line."""

    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the run's updates in which the rate rises to lr; 0: no warm-up."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Adam's decoupled weight decay: an update shrinks a weight by the learning rate times this."""

    betas: Pair = Field(default=[0.9, 0.999])
    """Adam's decay rates per update, of the running means of the gradient and of its square.

    The shipped SFT runs of 7B and larger use 0.95 for the second, as is usual: 0.999 averages
    over 1,000 updates, more than these runs have. RL keeps verl's 0.999.
    """

    clip_grad: PositiveFloat = 1.0
    """Largest norm of the gradient over all parameters. A larger gradient is scaled down to it."""

    @model_validator(mode="after")
    def _check_min_lr(self) -> Optim:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} is above lr = {self.lr}. Lower min_lr or raise lr")
        return self

    @model_validator(mode="after")
    def _check_betas(self) -> Optim:
        if not all(0 <= beta < 1 for beta in self.betas):  # Adam divides by 1 - beta
            raise ValueError(f"betas = {self.betas} are out of range. Give two numbers from 0 to below 1")
        return self


class JobConfig(Section):
    """The settings of every job: SFT, RL or an evaluation."""

    source: str = Field(default="<memory>", exclude=True)
    """The file that the settings come from. Every error names it."""

    run: Run
    cluster: Cluster
    model: Model


class RunConfig(JobConfig):
    """The sections that SFT and RL share."""

    lora: Lora = Lora()
    parallel: Parallel = Parallel()
    experts: Experts = Experts()
    memory: Memory = Memory()
    optim: Optim
    checkpoint: Checkpoint
    best: Best = Best()
    verl_overrides: dict[str, Any] = Field(default={})
    """At most 10 keys of verl's config and their values, for options without a setting here.

    A key that a setting determines is an error.
    """

    @property
    def max_sequence_tokens(self) -> int:
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def num_steps(self) -> int:
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def data_files(self) -> list[tuple[str, str]]:
        """(setting, path) of every data file that the run reads, the training files first.

        Raises DataError if data.train_file is a folder or a pattern without files.
        """
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def train_files(self) -> list[str]:
        """The files that data.train_file names, by name. Raises DataError like ``data_files``."""
        return [path for setting, path in self.data_files if setting == "data.train_file"]

    @property
    def validation_interval(self) -> tuple[str, int]:
        """(setting, steps) between two validations; 0: there are none."""
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def saved_every(self) -> int:
        """Steps between two checkpoints; the last step is saved too. 0: there are none.

        With checkpoint.every_steps = 0, a run that exports saves only its last step.
        """
        return self.checkpoint.every_steps or (self.num_steps if self.checkpoint.export else 0)

    @property
    def validation_metrics(self) -> dict[str, str]:
        """The metrics for best.metric, each with the mode that its name implies, or ""."""
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    @property
    def best_mode(self) -> str:
        """The direction of best.metric: "max" or "min", from its prefix or implied by its name."""
        return self.best.mode or self.validation_metrics[self.best.name]

    @model_validator(mode="after")
    def _best_rules(self) -> RunConfig:
        if not self.best.metric:
            return self
        metric, known, (key, every) = self.best.name, self.validation_metrics, self.validation_interval
        saved = self.checkpoint.every_steps
        if metric not in known:
            raise ValueError(f'Unknown best.metric = "{metric}". Choose one of: {", ".join(known)}')
        if not self.best_mode:
            raise ValueError(
                f'best.metric = "{metric}" does not imply whether high or low is better. Write "max {metric}" or '
                f'"min {metric}"'
            )
        for setting, interval in ((key, every), ("checkpoint.every_steps", saved)):
            if not interval:
                raise ValueError(
                    f'best.metric = "{metric}" needs validations and checkpoints, but {setting} = 0. Set it'
                )
        if every % saved:
            raise ValueError(
                f'best.metric = "{metric}" needs every validated step to be saved, but {key} = {every} is not a '
                f"multiple of checkpoint.every_steps = {saved}. Make them equal, or the first a multiple of the second"
            )
        return self

    def train_gpus(self) -> int:
        """Count the GPUs of [cluster] that train. Raises ValueError if an RL run leaves none."""
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
        if p.vpp > 1 and p.pp == 1:
            raise ValueError(
                f"parallel.vpp = {p.vpp} divides pipeline stages, but parallel.pp = 1 has only one. Set pp above 1, or "
                "leave out vpp"
            )
        ranks = gpus // p.pp
        if ranks % (p.expert_tp * p.ep):
            raise ValueError(
                f"parallel.etp * ep = {p.expert_tp} * {p.ep} = {p.expert_tp * p.ep} does not divide the {ranks} ranks "
                f"of {'the pipeline stage' if p.pp > 1 else 'the model'}, tp * cp * dp = {p.tp} * {p.cp} * {self.dp}. "
                "Lower one of them; etp defaults to tp"
            )
        self._check_recomputed_collectives()
        check_saving(self.checkpoint, self.memory.optimizer_on_cpu)
        if len(self.verl_overrides) > MAX_VERL_OVERRIDES:
            raise ValueError(
                f"[verl_overrides] has {len(self.verl_overrides)} keys, but at most {MAX_VERL_OVERRIDES} are allowed. "
                "Leave some out, or propose a setting for them"
            )
        return self

    @model_validator(mode="after")
    def _lora_rules(self) -> RunConfig:
        unsupported = {
            f'model.fp8 = "{self.model.fp8}"': self.model.fp8 != "off",
            f"memory.optimizer_on_cpu = {self.memory.optimizer_on_cpu}": self.memory.optimizer_on_cpu > 0,
        }
        for setting, is_on in unsupported.items():
            if is_on and self.lora.rank:
                raise ValueError(f"lora.rank = {self.lora.rank} with {setting} is not supported. Leave out one of them")
        return self

    def _check_recomputed_collectives(self) -> None:
        """Refuse "auto", which recomputes per rank, if ranks exchange data inside the layers."""
        balancing = self.experts.load_balancing
        exchanging = {
            f"parallel.ep = {self.parallel.ep} sends tokens": self.parallel.ep > 1,
            f"experts.load_balancing = {balancing} sends counts": "global_aux_loss" in balancing,
        }
        for setting, is_on in exchanging.items():
            if is_on and self.memory.recompute == "auto":
                raise ValueError(
                    f'memory.recompute = "auto" may recompute a layer on one data-parallel rank only, and {setting} '
                    'between ranks in each layer, which would then deadlock. Use "full" or "none"'
                )

    def to_toml(self) -> str:
        """The resolved run as TOML; reading it back gives an equal configuration."""
        return tomli_w.dumps(self.model_dump())
