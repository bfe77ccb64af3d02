"""What a run saves, what it resumes from, and which of its checkpoints is the best."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from retool_mcore.config.base import Pair, PositiveInt, Section, StepInterval


class Checkpoint(Section):
    """When checkpoints are saved, and in which form.

    The settings reshardable and asynchronous cost host memory, so they are off by default.
    """

    every_steps: StepInterval
    """Steps between two checkpoints, and one after the last step; 0: that one alone, for export."""

    keep: PositiveInt = 2
    """How many of the newest are kept; older ones are deleted after a newer one is complete."""

    resume: str = "auto"
    """What the run continues from: "auto", the newest complete one; "never"; or one's path."""

    export: bool = True
    """When the run ends, also write the last checkpoint's weights as a model, <run>/export.

    With every_steps = 0 and export = false a run keeps nothing.
    """

    reshardable: bool = False
    """Save the optimizer's states as whole tensors.

    A run can then resume on another layout with the same parallel.ep. Each save gathers them, 12
    bytes per parameter, on the host in one process of every data-parallel group. Without it each
    rank writes what it holds, and only the number of data-parallel ranks may change.
    """

    grace_s: Annotated[float, Field(ge=0)] = 25.0
    """Seconds to save and end after SIGTERM, SIGUSR1 or Ctrl-C; a second signal ends it at once.

    SFT finishes its step. RL breaks off a step that has not come to its update. Kubernetes and
    Slurm kill after 30 s by default: give them more, and this as much, where saving takes longer.
    """

    asynchronous: bool = False
    """A process beside each rank writes the files from a copy in host memory.

    Training goes on meanwhile; the checkpoint is complete once all of them have ended.
    """


class Best(Section):
    """Which checkpoint is the best, and when a run no longer waits for a better one.

    The best one outlives checkpoint.keep, stands in <run>/best.json, and is what a run exports at
    its end. Every validated step has to be saved: see run/best.py.
    """

    metric: str = ""
    """The metric of validation that decides; "": none does. SFT has "val_loss".

    The name implies whether the highest or the lowest value is best; "max NAME" or "min NAME" says
    it. RL: "val/accuracy", or "val-core/SOURCE/acc/mean@N", the accuracy on the validation problems
    whose data_source is SOURCE, with N = validation.n. A wrong name's error lists all there are.
    """

    patience: Pair = Field(default=[0, 0.0])
    """The run ends after so many validations in a row without a better value; 0: never.

    The second: by how much a value must be better for that, in units of the metric.
    """

    @property
    def name(self) -> str:
        """The metric, without what says whether it is best high or low."""
        return self.metric.removeprefix("min ").removeprefix("max ")

    @property
    def mode(self) -> str:
        """What metric says of it: "min", "max" or ""."""
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
                f"best.patience = {self.patience} does nothing without best.metric. Name one, "
                '"val_loss" in SFT or "val/accuracy" in RL, or leave it out'
            )
        if min(self.patience) < 0 or self.validations != self.patience[0]:
            raise ValueError(f"best.patience = {self.patience}: give a whole number of validations, and a gain")
        return self


def check_saving(checkpoint: Checkpoint, optimizer_on_cpu: float) -> None:
    if checkpoint.asynchronous and optimizer_on_cpu:
        raise ValueError(
            f"checkpoint.asynchronous with memory.optimizer_on_cpu = {optimizer_on_cpu}: the states lie in pinned "
            "memory, which a writer process does not inherit. Switch one of them off"
        )
