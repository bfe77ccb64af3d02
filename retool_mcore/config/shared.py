"""The sections that SFT and RL share, and the rules between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, model_validator

from retool_mcore.config.base import Every, Fraction, PositiveFloat, PositiveInt, Section

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
    fp8: Literal["off", "tensorwise", "blockwise"] = "off"  # Transformer Engine recipe for training's matrix products


class Parallel(Section):
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1  # interleaved model chunks per pipeline stage: a smaller bubble, more messages
    cp: PositiveInt = 1
    ep: PositiveInt = 1  # data-parallel ranks that share the experts of a mixture-of-experts model
    sequence_parallel: bool = True  # splits norms and dropout over the tp group; nothing to split at tp = 1

    @property
    def model_parallel(self) -> int:
        return self.tp * self.pp * self.cp


class Memory(Section):
    """What is kept, recomputed, shrunk or moved to the host so that a model fits.

    Each setting costs time: see perf/LOG.md.

    recompute            "none"; "selective": norms and what Megatron finds cheap; "full": whole
                         layers; "auto": whole layers, but only in micro-batches that are longer
                         than train.micro_batch_tokens because of one long sequence, and only as
                         many layers as it takes to use no more memory than at that length
    recompute_layers     with "full": the layers to recompute per pipeline stage; 0: all of them
    fused_cross_entropy  make no float32 copies of the logits. There are several, and each takes
                         10 GB for 16 k tokens of a 152 k vocabulary
    adam_states          bytes per parameter for the master weight and two moments. "float32": 12;
                         "compact": 10, the master weight is the bfloat16 weight plus its 16
                         missing bits, which is exact; "bfloat16": 6, with bfloat16 moments
    optimizer_on_cpu     fraction of the optimizer's states that live and are updated on the host
    offload_idle         RL: move the actor's weights and optimizer to the host while the rollout
                         engine works
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
    # The schedule moves with every optimizer update, in every mode of RL too. The first update uses
    # the schedule's first rate.
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


class Checkpoint(Section):
    """When checkpoints are saved, and in which form.

    export        when the run ends, also write the last checkpoint's weights as a model directory,
                  <run>/export

    The last two settings cost host memory, so they are off by default.

    reshardable   save the optimizer's states as whole tensors, so that a run can resume on another
                  layout with the same parallel.ep. Each save gathers them, 12 bytes per parameter,
                  on the host in one process of every data-parallel group. Without it each rank
                  writes what it holds, and only the number of data-parallel ranks may change
    asynchronous  a process beside each rank writes the files from a copy in host memory while
                  training goes on; the checkpoint is complete once all of them have ended
    """

    every_steps: Every
    keep: PositiveInt = 2  # how many of the newest; older ones are deleted after a newer one is complete
    resume: str = "auto"  # "auto": the newest complete one; "never"; or a checkpoint's path
    export: bool = True
    reshardable: bool = False
    asynchronous: bool = False


def check_saving(checkpoint: Checkpoint, optimizer_on_cpu: float) -> None:
    if checkpoint.asynchronous and optimizer_on_cpu:
        raise ValueError(
            f"checkpoint.asynchronous with memory.optimizer_on_cpu = {optimizer_on_cpu}: the states lie in pinned "
            "memory, which a writer process does not inherit. Switch one of them off"
        )


class RunConfig(Section):
    """The sections that SFT and RL share. ``source`` names the file in every error."""

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
        """(setting, path) of every data file that the run reads, the training file first."""
        raise NotImplementedError("a run is an SftConfig or an RlConfig")

    def train_gpus(self) -> int:
        """Count the GPUs of [cluster] that train. Raises ValueError when an RL run leaves none."""
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
