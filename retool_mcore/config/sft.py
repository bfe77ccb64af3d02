"""Supervised fine-tuning: its sections, and the rules between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveInt, Section, StepInterval
from retool_mcore.config.files import parquet_files
from retool_mcore.config.shared import RunConfig


class SftData(Section):
    """The conversations that SFT learns from."""

    train_file: str
    """Parquet with rows {messages, tools}, as `retool data sft` writes them.

    One file, a folder of them, or a pattern such as "data/part-*.parquet".
    """

    max_length_tokens: PositiveInt
    """Longest row in tokens, rendered with the model's chat template; longer ones are left out."""

    allow_overlap: bool = False
    """True: over a tenth of the problems of a file of validation.files may be trained on."""


class SftTrain(Section):
    """How long SFT trains, and on how much at once."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""

    global_batch: PositiveInt
    """Sequences per optimizer step, over all data-parallel ranks."""

    micro_batch_tokens: PositiveInt
    """Budget in tokens of a packed micro-batch on one rank, forward and backward."""

    stall_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds without any sign of life after which the run ends; 0: never.

    Signs: an update, a batch of a validation, a step, a checkpoint. The stacks of its processes are
    then in logs/. `retool plan` and `retool preflight` compare it with the update that is planned.
    """


class SftValidation(Section):
    """What the loss is measured on beside training, and when."""

    files: list[str] = Field(min_length=1)
    """Parquet, as data.train_file; the loss is that of all their rows."""

    every: StepInterval
    """Steps between two validations, and one after the last step; 0: never."""


class SftConfig(RunConfig):
    data: SftData
    train: SftTrain
    validation: SftValidation

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_length_tokens

    @property
    def num_steps(self) -> int:
        return self.train.steps

    @property
    def data_files(self) -> list[tuple[str, str]]:
        train = [("data.train_file", path) for path in parquet_files(self.data.train_file)]
        return [*train, *(("validation.files", path) for path in self.validation.files)]

    @property
    def validated(self) -> tuple[str, int]:
        return "validation.every", self.validation.every

    @property
    def validation_metrics(self) -> dict[str, str]:
        return {"val_loss": "min"}

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
