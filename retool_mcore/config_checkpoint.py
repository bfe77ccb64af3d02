"""The section [checkpoint] of a run file, and what cannot go together with it."""

from __future__ import annotations

from retool_mcore.config_base import Every, PositiveInt, Section


class Checkpoint(Section):
    """When checkpoints are saved, and in which form. The last two cost host memory, so they are off by default.

    export        the last checkpoint's weights also as a model directory, <run>/export, when the run has ended

    reshardable   the optimizer's states are saved as whole tensors, so that a run can be resumed on another
                  layout of the same parallel.ep. Each save gathers them, 12 bytes a parameter, on one host process of
                  every data-parallel group; without it a rank writes what it holds, and only the number of
                  data-parallel ranks may change
    asynchronous  a process beside each rank writes the files from a copy in host memory while training goes on;
                  the checkpoint counts once all of them have ended
    """

    every_steps: Every
    keep: PositiveInt = 2  # the newest; older ones are deleted after a newer one is complete
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
