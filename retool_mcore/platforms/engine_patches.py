"""The patches of verl's Megatron engine, of mbridge and of Megatron's checkpoint writer.

Every platform that has patches applies them.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from multiprocessing.connection import Connection
from multiprocessing.managers import SyncManager
from typing import Any

from retool_mcore.platforms.expert_export import EXPERT_EXPORT_PATCH
from retool_mcore.platforms.model_patches import MODEL_PATCHES
from retool_mcore.platforms.packing import PACKING_PATCHES
from retool_mcore.platforms.padding import PADDING_PATCHES
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.pickles import INDEX_PATCH
from retool_mcore.platforms.versions import requirement
from retool_mcore.process import die_with_parent

MIN_MICRO_BATCHES = "min_num_micro_batch"  # in a batch's non-tensor data: cut it into at least so many


def _as_many_as_asked(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_micro_batches(data: Any, **kwargs: Any) -> Any:
        from verl.utils.tensordict_utils import get_non_tensor_data

        kwargs["min_num_micro_batch"] = get_non_tensor_data(data, MIN_MICRO_BATCHES, kwargs.get("min_num_micro_batch"))
        return original(data=data, **kwargs)

    return prepare_micro_batches


def _chunks_share_a_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original for the model's first chunk, then set the functions of all chunks.

    Megatron's interleaved schedule needs a list of them.
    """

    @wraps(original)
    def register_megatron_training_hooks(model: list[Any], optimizer: Any) -> None:
        original(model[:1], optimizer)
        if len(model) == 1:
            return
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        for name, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
            if getattr(config, name) is not None:
                setattr(config, name, [getattr(chunk, method) for chunk in model])

    return register_megatron_training_hooks


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


def _at_once_without_a_pipeline(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give back ``value``, a weight or its name, where the pipeline's only stage has it.

    The original gathers a pickled description of it from all stages first, for each weight of a
    model, and copies it to the device and back on the way.
    """

    @wraps(original)
    def broadcast(value: Any) -> Any:
        from megatron.core import parallel_state

        alone = parallel_state.get_pipeline_model_parallel_world_size() == 1
        return value if alone and value is not None else original(value)

    return broadcast


MICRO_BATCH_PATCH = Patch(  # memory.recompute = "auto" applies this one on every platform, with or without patches
    target="verl.workers.engine.megatron.transformer_impl.prepare_micro_batches",
    replace=_as_many_as_asked,
    reason="the budget of a micro-batch must hold the longest sequence, and verl then packs all others to it, too",
    applies_to=requirement("verl"),
    remove_when="verl's Megatron engine takes min_num_micro_batch from its data",
)
ENGINE_PATCHES = (
    MICRO_BATCH_PATCH,
    INDEX_PATCH,
    EXPERT_EXPORT_PATCH,
    *MODEL_PATCHES,
    *PACKING_PATCHES,
    *PADDING_PATCHES,
    Patch(
        target="verl.workers.engine.megatron.transformer_impl.register_megatron_training_hooks",
        replace=_chunks_share_a_config,
        reason="with interleaved chunks and overlapped gradient reduction it refuses what it has just set itself",
        applies_to=requirement("verl"),
        remove_when="verl sets the functions of all chunks once for the configuration that they share",
    ),
    *(
        Patch(
            target=f"mbridge.core.bridge.{name}",
            replace=_at_once_without_a_pipeline,
            reason="two exchanges of objects for each weight of each weight sync, also where there is no pipeline",
            applies_to=requirement("mbridge"),
            remove_when="mbridge asks the other stages only where there are any",
        )
        for name in ("broadcast_from_megatron_pp", "broadcast_str_from_megatron_pp")
    ),
    Patch(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async._get_write_results_queue",
        replace=_results_queue,
        reason="the manager process of the checkpoint writer lives on when its rank is killed",
        applies_to=requirement("megatron-core"),
        remove_when="Megatron-core's checkpoint writer starts its manager bound to the rank's life",
    ),
    Patch(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync"
        ".write_preloaded_data_multiproc",
        replace=_watched_writers,
        reason="a save waits for ever for a writing process that was killed, as by the kernel when memory is short",
        applies_to=requirement("megatron-core"),
        remove_when="Megatron-core's checkpoint writer notices that one of its processes has ended",
    ),
)
