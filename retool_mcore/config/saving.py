"""[checkpoint] and [best]: what a run saves and resumes from, and which checkpoint is the best."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import Pair, PositiveInt, Section, StepInterval


class Checkpoint(Section):
    """When and how checkpoints are saved.

    reshardable and asynchronous cost host memory, so they are off by default.
    """

    every_steps: StepInterval
    """Steps between two checkpoints; the last step is saved too. 0: only the last, for export."""

    keep: PositiveInt = 2
    """Newest checkpoints to keep. Older ones are deleted once a newer one is complete."""

    resume: str = "auto"
    """Resume from the newest complete checkpoint ("auto"), from none ("never"), or from a path."""

    export: bool = True
    """At the end of the run, also write the last checkpoint's weights as a model, <run>/export.

    With every_steps = 0 and export = false a run keeps nothing.
    """

    reshardable: bool = False
    """Save the optimizer states as whole tensors.

    A run can then resume on another layout with the same parallel.ep and parallel.etp. Each save
    gathers the states, 12 bytes per parameter, in host memory, in one process of every
    data-parallel group. Without it each rank writes its shard, and only the number of data-parallel
    ranks may change, if parallel.ep = 1.
    """

    grace_s: Annotated[float, Field(ge=0)] = 25.0
    """Seconds to save and exit after SIGTERM, SIGUSR1 or Ctrl-C. A second signal exits at once.

    SFT finishes its step. RL abandons a step that has not reached its update. Kubernetes and Slurm
    kill after 30 s by default. If saving takes longer, raise their limit and this one.
    """

    asynchronous: bool = False
    """Continue training while a writer process per rank writes the files from host memory.

    The checkpoint is complete once all writers have finished.
    """


class Best(Section):
    """Which checkpoint is the best, and when a run stops early.

    The best checkpoint is exempt from checkpoint.keep, is named in <run>/best.json, and is exported
    at the end. Every validated step must be saved: see run/checkpoint.py.
    """

    metric: str = ""
    """The validation metric that decides; "": none. SFT has "val_loss".

    Most names imply whether high or low is better; otherwise write "max NAME" or "min NAME". RL has
    "val/accuracy" and "val-core/SOURCE/acc/mean@N", the accuracy on the validation problems whose
    data_source is SOURCE, with N = validation.n. The error for an unknown name lists all metrics.
    """

    patience: Pair = Field(default=[0, 0.0])
    """Stop after this many validations in a row without improvement; 0: never.

    The second number is the smallest improvement that counts, in units of the metric.
    """

    @property
    def name(self) -> str:
        """The metric, without "max" or "min"."""
        return self.metric.removeprefix("min ").removeprefix("max ")

    @property
    def mode(self) -> str:
        """The prefix of metric: "min", "max" or ""."""
        return self.metric[:3] if self.name != self.metric else ""

    @property
    def validations(self) -> int:
        return int(self.patience[0])

    @property
    def min_delta(self) -> float:
        return self.patience[1]

    @model_validator(mode="after")
    def _check_patience(self) -> Best:
        if not self.metric and any(self.patience):
            raise ValueError(
                f"best.patience = {self.patience} has no effect without best.metric. Set best.metric, such as "
                '"val_loss" in SFT or "val/accuracy" in RL, or leave out patience'
            )
        if min(self.patience) < 0 or self.validations != self.patience[0]:
            raise ValueError(
                f"best.patience = {self.patience}: give a whole number of validations and the smallest improvement, "
                "both 0 or more"
            )
        return self


def check_saving(checkpoint: Checkpoint, optimizer_on_cpu: float) -> None:
    if checkpoint.asynchronous and optimizer_on_cpu:
        raise ValueError(
            f"checkpoint.asynchronous with memory.optimizer_on_cpu = {optimizer_on_cpu} is not supported: the "
            "optimizer states are in pinned memory, which a writer process does not inherit. Turn one of them off"
        )
