"""Executions give way to the trainer: it gets more of the CPU, and they go first for memory."""

import contextlib
import os
from pathlib import Path

# A third of the weight of a process at 0. Not less: rollouts wait for the executions.
_NICE = 5
_OOM_SCORE_ADJ = 1000  # the first to be killed when the machine's memory is full


def lower_priority(pid: int) -> None:
    """Lower the priority of ``pid`` and of all it will start.

    Nothing of this needs a privilege. It is set from outside, by number, so that ``pid`` need not
    have run yet. With CAP_SYS_RESOURCE the process cannot take the score back.
    """
    with contextlib.suppress(OSError):  # it may have ended already
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    # Where the kernel groups processes by session (sched_autogroup), the group's value counts.
    for name, value in (("oom_score_adj", _OOM_SCORE_ADJ), ("autogroup", _NICE)):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/{name}").write_text(str(value))
