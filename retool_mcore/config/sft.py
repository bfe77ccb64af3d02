"""Supervised fine-tuning: its sections, and the rules between them."""

from __future__ import annotations

from pydantic import model_validator

from retool_mcore.config.base import Every, PositiveInt, Section
from retool_mcore.config.shared import RunConfig


class SftData(Section):
    train_file: str  # parquet, rows {messages, tools}
    val_file: str
    max_length_tokens: PositiveInt
    allow_overlap: bool = False  # True: over a tenth of the validation problems may be trained on


class SftTrain(Section):
    steps: PositiveInt
    global_batch: PositiveInt  # sequences per optimizer step, over all data-parallel ranks
    micro_batch_tokens: PositiveInt  # budget of a packed micro-batch on one rank
    val_every_steps: Every


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
