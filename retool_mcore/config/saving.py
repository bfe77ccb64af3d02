"""What a run saves, what it resumes from, and which of its checkpoints is the best."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from retool_mcore.config.base import PositiveInt, Section, StepInterval


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

    RL: "val/accuracy", or "val-core/SOURCE/acc/mean@N", the accuracy on the validation problems
    whose data_source is SOURCE, with N = validation.n. A wrong name's error lists all there are.
    """

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether the highest or the lowest value is best; "auto": as the metric's name implies."""

    patience: Annotated[int, Field(ge=0)] = 0
    """The run ends after so many validations in a row without a better value; 0: never."""

    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better a value must be for patience to start anew, in units of the metric."""

    @model_validator(mode="after")
    def _check_patience(self) -> Best:
        if not self.metric and (self.patience or self.min_delta or self.mode != "auto"):
            raise ValueError(
                f'best.patience = {self.patience}, best.min_delta = {self.min_delta} and best.mode = "{self.mode}" do '
                'nothing without best.metric. Name one, "val_loss" in SFT or "val/accuracy" in RL, or leave them out'
            )
        return self


def check_saving(checkpoint: Checkpoint, optimizer_on_cpu: float) -> None:
    if checkpoint.asynchronous and optimizer_on_cpu:
        raise ValueError(
            f"checkpoint.asynchronous with memory.optimizer_on_cpu = {optimizer_on_cpu}: the states lie in pinned "
            "memory, which a writer process does not inherit. Switch one of them off"
        )
