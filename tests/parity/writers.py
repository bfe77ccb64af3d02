"""Megatron's checkpoint writers on buckets of our own, one of which may kill its process."""

import os
import queue
import signal
from pathlib import Path
from typing import Any

import torch

KILLED = 1  # the number of the bucket whose process is killed


class KillsItsWriter(torch.Tensor):
    """A tensor that ends the process that looks where it lies, as its writer does."""

    @property
    def is_cpu(self) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True


def write(folder: Path, count: int, killed: int | None = None) -> Any:
    """What the writers of ``count`` files with two tensors each report."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    folder.mkdir(parents=True, exist_ok=True)
    buckets: list[Any] = []
    for number in range(count):
        tensors = {f"{number}.{name}": torch.full((3, number + 1), float(number)) for name in "ab"}
        items = [(item, tensor) for name, tensor in tensors.items() for item in _create_write_items(name, tensor)]
        if number == killed:
            items = [(item, tensor.as_subclass(KillsItsWriter)) for item, tensor in items]
        buckets.append((folder / f"__{number}.distcp", f"__{number}.distcp", ([], items)))
    results: queue.Queue[Any] = queue.Queue()
    FileSystemWriterAsync.write_preloaded_data_multiproc([_StorageWriterTransforms()], False, 0, buckets, results)
    return results.get_nowait()
