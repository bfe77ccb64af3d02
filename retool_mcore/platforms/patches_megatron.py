"""Patches of Megatron-core: its checkpoint writer, in every process that trains."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.managers import SyncManager
from typing import Any

from retool_mcore.platforms.patches import Change, Patch, requirement
from retool_mcore.process import die_with_parent


def _results_queue(original: Callable[[], Any]) -> Callable[[], Any]:
    """Make the queue once, as the original does, but end its manager with this process."""
    module: Any = sys.modules[original.__module__]

    @wraps(original)
    def get_write_results_queue() -> Any:
        if module._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
            manager.start(initializer=die_with_parent)
            module._results_queue = manager.Queue()
        return module._results_queue

    return get_write_results_queue


class _Sent:
    """Both queues that Megatron's ``write_preloaded_data`` is given, as the end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.put = pipe.send

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _watched_writers(original: staticmethod[..., None]) -> staticmethod[..., None]:
    """Write each bucket in a process of its own, as the original does, and notice one that dies.

    The original waits until every process has said that it is done. Here each has a pipe, which the
    kernel closes with the process.
    """
    module: Any = sys.modules[original.__module__]
    context = multiprocessing.get_context("fork")

    def write_preloaded_data_multiproc(
        transform_list: list[Any], use_msc: bool, rank: int, write_buckets: Sequence[Any], global_results_queue: Any
    ) -> None:
        del rank
        write, started = module.FileSystemWriterAsync.write_preloaded_data, list[tuple[Connection, Any]]()
        for number, bucket in enumerate(write_buckets):
            ours, theirs = context.Pipe(duplex=False)
            sent = _Sent(theirs)
            process = context.Process(
                target=write, args=(transform_list, number, bucket, sent, sent, True), kwargs={"use_msc": use_msc}
            )
            process.start()
            theirs.close()  # before the next fork, so that this process alone keeps it open
            started.append((ours, process))
        results: dict[int, Any] = {}
        failure: Exception | None = None
        for number, (ours, process) in enumerate(started):
            try:
                _, result = ours.recv()
            except EOFError:
                process.join()
                result = RuntimeError(f"its writing process {process.pid} ended with code {process.exitcode}")
            process.join()
            results[number] = result
            if isinstance(result, Exception):
                failure = failure or result
        global_results_queue.put(failure or results)

    return staticmethod(wraps(original)(module._disable_gc()(write_preloaded_data_multiproc)))


_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async."
MEGATRON_PATCHES = (
    Patch(
        changes=(
            Change(
                f"{_WRITER}FileSystemWriterAsync.write_preloaded_data_multiproc",
                ("transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"),
                _watched_writers,
            ),
        ),
        reason="a save waits forever for a writer process that was killed, as the kernel does when memory is short",
        gain="The save fails with the writer's exit code instead of hanging",
        applies_to=requirement("megatron-core"),
        remove_when="Megatron-core's checkpoint writer notices that one of its processes has ended",
    ),
    Patch(
        changes=(Change(f"{_WRITER}_get_write_results_queue", (), _results_queue),),
        reason="the manager process of the checkpoint writer survives when its rank is killed",
        gain="A killed run leaves no process behind",
        applies_to=requirement("megatron-core"),
        remove_when="Megatron-core's checkpoint writer starts its manager bound to the rank's life",
    ),
)
