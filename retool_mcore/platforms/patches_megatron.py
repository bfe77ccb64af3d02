"""Patch of Megatron-core's checkpoint writer, for every training process."""

import pickle
import queue
import tempfile
from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.patches import Change, Patch, requirement


class Results:
    """Results of Megatron's writer, in an anonymous file that it shares with the forked process.

    Megatron has one queue for all saves of a process, in a manager process. The manager outlives a
    killed rank, and actor and critic, which save at the same time, could get each other's results.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the save

    def put(self, result: Any) -> None:
        pickle.dump(result, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None


def _by_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start an asynchronous save with Megatron's own writer."""

    @wraps(original)
    def async_save(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        return original(self, sharded_state_dict, checkpoint_dir, "mcore")

    return async_save


_STRATEGIES = "megatron.core.dist_checkpointing.strategies."
WRITER_PATCH = Patch(
    changes=(
        Change(
            f"{_STRATEGIES}fully_parallel.FullyParallelSaveStrategyWrapper.async_save",
            ("self", "sharded_state_dict", "checkpoint_dir", "async_strategy"),
            _by_megatron,
        ),
        Change(
            f"{_STRATEGIES}filesystem_async.get_write_results_queue",
            ("mp_mode",),
            lambda original: lambda mp_mode="spawn": Results(),
        ),
    ),
    reason="all saves share one queue, whose manager process survives a killed rank; and verl's asynchronous saves "
    "need nvidia-resiliency-ext, which has the same writer",
    gain="Lost data without it: actor and critic, which save at the same time, swap their results",
    applies_to=requirement("megatron-core"),
    remove_when="Megatron-core's checkpoint writer has a queue for each save",
)
