"""Patch of Megatron-core's checkpoint writer, for every training process."""

import pickle
import queue
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from retool_mcore.platforms.patches import Change, Patch, requirement


class Results:
    """Results of Megatron's writers, in an anonymous file that forked writers share.

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


def _in_threads(original: Any) -> Any:
    """Write each bucket in a thread; the original waits forever for a killed process."""

    def write_preloaded_data_multiproc(
        transform_list: list[Any], use_msc: bool, rank: int, write_buckets: Sequence[Any], global_results_queue: Any
    ) -> None:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        results: dict[int, Any] = {}
        reports = SimpleNamespace(put=lambda report: results.update([report]))
        nobody = SimpleNamespace(get=lambda: None, task_done=lambda: None)
        write = partial(FileSystemWriterAsync.write_preloaded_data, transform_list, use_msc=use_msc)
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            list(pool.map(lambda bucket: write(*bucket, reports, nobody, True), enumerate(write_buckets)))
        failed = [result for result in results.values() if isinstance(result, Exception)]
        global_results_queue.put(failed[0] if failed else results)

    return staticmethod(wraps(original)(write_preloaded_data_multiproc))


_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async."
WRITER_PATCH = Patch(
    changes=(
        Change(
            f"{_WRITER}FileSystemWriterAsync.write_preloaded_data_multiproc",
            ("transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"),
            _in_threads,
        ),
        Change(f"{_WRITER}_get_write_results_queue", (), lambda original: Results),
    ),
    reason="a save waits forever for a writer process that the kernel killed when memory was short; all saves share "
    "one queue, whose manager process survives a killed rank",
    gain="Lost data without it: a save hangs, or actor and critic, which save at the same time, swap their results",
    applies_to=requirement("megatron-core"),
    remove_when="Megatron-core's checkpoint writer detects dead processes and has a queue for each save",
)
