"""Supervised fine-tuning: its sections, and the rules between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveInt, Section, StepInterval
from retool_mcore.config.files import parquet_files
from retool_mcore.config.shared import RunConfig


class SftData(Section):
    """The conversations that SFT trains on."""

    train_file: str
    """Parquet with rows {messages, tools}, as `retool data sft` writes them.

    A file, a folder of files, or a pattern such as "data/part-*.parquet".
    """

    max_length_tokens: PositiveInt
    """Longest row in tokens, rendered with the chat template. Longer rows are left out."""

    allow_overlap: bool = False
    """Allow training on more than a tenth of the problems of a file in validation.files."""


class SftTrain(Section):
    """How long SFT trains, and its batch sizes."""

    steps: PositiveInt
    """Optimizer steps of the whole run."""

    global_batch: PositiveInt
    """Sequences per optimizer step, over all data-parallel ranks."""

    micro_batch_tokens: PositiveInt
    """Token budget of a packed micro-batch on one rank, forward and backward."""

    stall_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds without progress after which the run ends; 0: never.

    Progress is a stage of the start, an update, a validation batch, a step or a checkpoint. Before
    it ends, the run writes the stacks of its processes to logs/. `retool plan` and
    `retool preflight` compare this limit with the planned update.
    """


class SftValidation(Section):
    """The data of the validation loss, and when it is computed."""

    files: list[str] = Field(min_length=1)
    """Parquet, as in data.train_file. The loss covers all rows of all files."""

    every: StepInterval
    """Steps between two validations; the last step is validated too. 0: never."""


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
    def validation_interval(self) -> tuple[str, int]:
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
                f"train.micro_batch_tokens * parallel.cp = {budget} tokens. Lower the first, raise the second, or "
                'recompute longer sequences with memory.recompute = "auto"'
            )
        return self
