"""Saves and loads the checkpoints of one rank's engine; saves those of all roles asynchronously.

verl 0.9.1 can start asynchronous writes in Megatron but never checks whether they finished. Here
each rank forks one process that writes all its files of a checkpoint. run/checkpoint.py publishes a
checkpoint when every rank has finished, so a checkpoint is complete or absent.
"""

import gc
import logging
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from retool_mcore.errors import CheckpointError, ReToolError
from retool_mcore.model.files import tensor_files
from retool_mcore.model.tensors import HEAD, missing_tensors, write_tensors
from retool_mcore.platforms.patches_megatron import WRITER_PATCH
from retool_mcore.platforms.value_head import VALUE_HEAD, value_head
from retool_mcore.process import die_with_parent
from retool_mcore.run.checkpoint import read_state, record_checksums

logger = logging.getLogger(__name__)


def load_checkpoint(engine: Any, folder: str, *, new_seed: int | None = None) -> None:
    """Load weights, optimizer, schedule and random states from a checkpoint.

    ``new_seed`` seeds new random states instead; see ``new_seed_if_relaid_out``. The schedule takes
    its position from the checkpoint, and its learning rates and weight decay from the run's
    settings. Raises CheckpointError for adapters of another base model.
    """
    engine.lr_scheduler.num_steps = 0  # loading adds the saved number of updates to it
    manager = engine.checkpoint_mananager  # verl's spelling
    contents = manager.checkpoint_load_contents
    try:
        if new_seed is not None:
            manager.checkpoint_load_contents = [content for content in contents if content != "extra"]
        with _keep_schedule(engine):
            engine.load_checkpoint(local_path=folder, del_local_after_load=False)
    finally:
        manager.checkpoint_load_contents = contents
    if new_seed is not None:
        from verl.workers.engine.megatron.utils import set_random_seed

        logger.warning("%s has another parallel layout: its random states are replaced by seed %d", folder, new_seed)
        set_random_seed(new_seed)


# The attributes of a schedule that a load may set: its position and its length in updates.
LOADED = ("optimizer", "num_steps", "lr_decay_steps", "lr_warmup_steps", "wd_incr_steps")


@contextmanager
def _keep_schedule(engine: Any) -> Iterator[None]:
    """Keep the run's learning rates and weight decay, which a load would silently overwrite.

    The schedule keeps the checkpoint's length: raising train.steps does not start a new schedule
    (run/checkpoint.py).

    Megatron stores the rates twice: in the schedule, and as max_lr and min_lr of each parameter
    group. The groups' values take precedence and are saved with the optimizer. Megatron's option
    override_opt_param_scheduler does not help: it leaves the groups' values as loaded, and with it
    verl does not load the position.
    """
    schedule = engine.lr_scheduler
    own = {name: value for name, value in vars(schedule).items() if name not in LOADED}
    bounds = [
        {name: group[name] for name in ("max_lr", "min_lr") if name in group} for group in engine.optimizer.param_groups
    ]
    yield
    vars(schedule).update(own)
    for group, bound in zip(engine.optimizer.param_groups, bounds, strict=True):
        group.update(bound)
    schedule.step(0)  # sets learning rate and weight decay of every group for the loaded position


def new_seed_if_relaid_out(engine: Any, checkpoint: Path) -> int | None:
    """The seed of new random states for a run that resumes from ``checkpoint``, or None.

    The saved states belong to tensor and pipeline parallel ranks, so they fit only the same TP and
    PP sizes. Data-parallel ranks share them.
    """
    saved, now = read_state(checkpoint), engine.engine_config
    sizes = {"tp": now.tensor_model_parallel_size, "pp": now.pipeline_model_parallel_size}
    if all(saved.layout[name] == size for name, size in sizes.items()):
        return None
    return int(np.random.SeedSequence((now.seed, saved.step)).generate_state(1)[0])


class Writer:
    """A forked process that runs ``jobs`` in order, on a snapshot of this process's memory.

    The kernel kills it when this process ends.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        fork = multiprocessing.get_context("fork")
        self._receiver, sender = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_work, args=(jobs, sender), name="checkpoint writer")
        self._process.start()
        sender.close()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def wait(self) -> str | None:
        """Wait until the process ends. Returns its error message, or None if it succeeded."""
        message: str | None = None
        with suppress(EOFError):  # the process ended without a message: it succeeded or was killed
            message = self._receiver.recv()
        self._process.join()
        if message is None and self._process.exitcode:
            return f"the process that wrote it ended with exit code {self._process.exitcode}"
        return message

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _work(jobs: Sequence[Callable[[], object]], sender: Any) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # fork does not copy the threads of torch's pool
    gc.disable()  # a collection here would free the parent's device memory
    try:
        for job in jobs:
            job()
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def explain_failed_write(folder: str) -> Iterator[None]:
    """Turn torch's CheckpointException of a failed write into a CheckpointError with the causes.

    CheckpointException is not a subclass of ``Exception``. All ranks raise it, but only rank 0 has
    the causes.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()]
        raise CheckpointError(
            f"{folder} could not be written: {'; '.join(causes)[:500] or 'see the error of rank 0'}"
        ) from error


class PendingSave:
    """A checkpoint that is being written. ``ended`` and ``finish`` are collective."""

    def __init__(self, folder: str, writer: Writer, finishers: Iterable[Callable[[], object]]) -> None:
        self._folder, self._writer, self._finishers = folder, writer, finishers

    def ended(self) -> bool:
        """Whether every rank's writer has ended."""
        running: list[bool] = [True] * dist.get_world_size()
        dist.all_gather_object(running, self._writer.running)
        return not any(running)

    def finish(self) -> None:
        """Wait for every rank's writer, then write the checkpoint's metadata.

        Raises CheckpointError on all ranks.
        """
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._writer.wait())
        failures = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if failures:
            raise CheckpointError(f"{self._folder} could not be written: {'; '.join(failures)[:500]}")
        with explain_failed_write(self._folder):
            for finisher in self._finishers:
                finisher()

    def kill(self) -> None:
        """Kill this rank's writer and abandon the checkpoint."""
        self._writer.kill()


def save(engine: Any, folder: str, step: int) -> None:
    """Write a checkpoint. Collective. Raises CheckpointError."""
    WRITER_PATCH.apply()

    def write_now(models: Any, weights_path: str, **_: Any) -> None:
        if job := _staged(engine, weights_path):
            job()
        dist.barrier()

    with explain_failed_write(folder), _saving_weights(engine, write_now):
        engine.save_checkpoint(local_path=folder, global_step=step)
    record_checksums(Path(folder), dist.get_rank())


def start_save(engine: Any, folder: str, step: int) -> PendingSave:
    """Copy the state to host memory and fork a process on each rank that writes it.

    Collective. Requires ``checkpoint.async_save`` in verl's configuration of the engine.
    """
    WRITER_PATCH.apply()
    manager = engine.checkpoint_mananager
    jobs: list[Callable[[], object]] = []
    finishers: list[Callable[[], object]] = []

    def intercept(requests: Sequence[Any], finalize: Callable[[], object]) -> None:
        for request in requests:
            if request.async_fn is not None:
                arguments = list(request.async_fn_args)
                if request.preload_fn is not None:
                    arguments[1] = request.preload_fn()  # copies tensors to the host, as Megatron's callers do
                jobs.append(partial(request.async_fn, *arguments, **request.async_fn_kwargs))
            finishers.extend(request.finalize_fns)
        finishers.append(finalize)

    def stage_weights(models: Any, weights_path: str, **_: Any) -> None:
        if job := _staged(engine, weights_path):
            jobs.append(job)

    manager._dispatch_finalize = intercept
    try:
        with _saving_weights(engine, stage_weights):
            engine.save_checkpoint(local_path=folder, global_step=step)
    finally:
        del manager._dispatch_finalize
    jobs.append(partial(record_checksums, Path(folder), dist.get_rank()))
    return PendingSave(folder, Writer(jobs), finishers)


@contextmanager
def _saving_weights(engine: Any, save_weights: Callable[..., None]) -> Iterator[None]:
    """Replace the bridge's function that saves the model's weights."""
    bridges, engine.bridge.save_hf_weights = engine.bridge.save_hf_weights, save_weights
    try:
        yield
    finally:
        engine.bridge.save_hf_weights = bridges


def _staged(engine: Any, path: str) -> Callable[[], None] | None:
    """Copy the weights, or the adapters if the engine has some, to the host. Collective.

    Returns, on rank 0 only, the function that writes them into the folder ``path``.
    """
    adapters: Any = getattr(engine, "adapters", None)
    if adapters is not None:
        return adapters.staged(path)
    weights = weights_on_host(engine)
    return partial(write_weights, engine, weights, path) if dist.get_rank() == 0 else None


def weights_on_host(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """All weights under their Hugging Face names, on rank 0; elsewhere []. Collective."""
    tasks = engine.bridge.get_conversion_tasks(engine.module)
    if engine.is_value_model:
        tasks = [task for task in tasks if not task.global_param_name.endswith(VALUE_HEAD)]
    weights = engine.bridge.export_hf_weights(engine.module, conversion_tasks=tasks, show_progress=False)
    first = dist.get_rank() == 0
    on_host = [(name, tensor.detach().cpu()) for name, tensor in weights if first]
    if engine.is_value_model:
        head = value_head(engine)
        on_host += [(HEAD, head.cpu())] if first else []
    return on_host


def write_weights(engine: Any, weights: Sequence[tuple[str, torch.Tensor]], path: str) -> None:
    """Write the ``weights`` into the same files as the source model; runs in the writer.

    Adds the weights that training does not load. config.json is the source model's, because verl
    and transformers would rewrite some of its fields under names that older programs do not know.
    A critic's value head has the name of the source's output layer.
    """
    target, tensors = Path(path), dict(weights)
    located = tensor_files(engine.model_config.local_path)
    if engine.is_value_model or located is None:
        write_tensors(target, tensors, {})
        return
    source, files = located
    write_tensors(target, tensors | dict(missing_tensors(source, tensors)), files)
    shutil.copyfile(source / "config.json", target / "config.json")


# ------------------------------------------------- all roles, in RL's driver


@contextmanager
def unwrap_worker_errors() -> Iterator[None]:
    """Re-raise a worker's ReToolError without Ray's RayTaskError around it."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ReToolError):
            raise error.cause from error
        raise


class WorkersSave:
    """The pending save of all roles' workers; implements ``checkpoint.Pending``."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def ended(self) -> bool:
        return all(all(group.save_ended()) for group in self._groups)

    def finish(self) -> None:
        with unwrap_worker_errors():
            for group in self._groups:
                group.finish_save()

    def kill(self) -> None:
        """Do nothing: a failed run ends its workers, and each writer dies with its worker."""
