"""Checkpoints of one rank's engine, and of all roles of a run: written beside the steps, and read.

verl 0.9.1 can ask Megatron for asynchronous writes, but never asks whether they have ended. Here
each rank forks one process that writes all files of a checkpoint. run/saving.py publishes a
checkpoint when every rank has finished, so it is complete or absent.
"""

import gc
import logging
import multiprocessing
import pickle
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
from retool_mcore.model.tensors import untrained_copies
from retool_mcore.platforms.patches import apply_all
from retool_mcore.platforms.patches_megatron import MEGATRON_PATCHES
from retool_mcore.process import die_with_parent
from retool_mcore.run import checksums
from retool_mcore.run.checkpoint import read_state

logger = logging.getLogger(__name__)


def load_checkpoint(engine: Any, folder: str, *, new_seed: int | None = None) -> None:
    """Load weights, optimizer, schedule and random states from a checkpoint.

    With ``new_seed`` the random states start afresh from it: the saved ones belong to the pipeline
    and tensor parallel ranks that saved them. Only the schedule's position comes from the
    checkpoint; its learning rates and weight decay are the run's own. Raises CheckpointError.
    """
    engine.lr_scheduler.num_steps = 0  # loading adds the saved updates to it
    source = getattr(engine.bridge, "safetensor_io", None)
    manager = engine.checkpoint_mananager  # verl's spelling
    contents = manager.checkpoint_load_contents
    try:
        if new_seed is not None:
            manager.checkpoint_load_contents = [content for content in contents if content != "extra"]
        with _own_schedule(engine), _explain_failed_read(folder):
            engine.load_checkpoint(local_path=folder, del_local_after_load=False)
    finally:
        manager.checkpoint_load_contents = contents
        if source is not None:  # exports read the model itself again: this checkpoint makes room for later ones
            engine.bridge.safetensor_io = source
    if new_seed is not None:
        from verl.workers.engine.megatron.utils import set_random_seed

        logger.warning("random states are of another layout than %s: they start afresh from %d", folder, new_seed)
        set_random_seed(new_seed)


@contextmanager
def _explain_failed_read(folder: str) -> Iterator[None]:
    """Turn whatever a damaged file raises into one error that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be loaded: {type(error).__name__}: {str(error)[:500]}. "
            "Move it away to resume from the one before it."
        ) from error


# Of a schedule, what a load may set: where it stands, and the updates that it spans.
LOADED = ("optimizer", "num_steps", "lr_decay_steps", "lr_warmup_steps", "wd_incr_steps")


@contextmanager
def _own_schedule(engine: Any) -> Iterator[None]:
    """Keep the run file's rates during a load, which would silently overwrite them.

    The span stays the checkpoint's: more steps begin no other schedule (run/checkpoint.py).

    Megatron stores the schedule's values twice: in the schedule, and as the bounds of each
    parameter group. The bounds take precedence and are saved with the optimizer. Megatron's own
    switch for this, override_opt_param_scheduler, leaves the groups' bounds as loaded, and with it
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
    schedule.step(0)  # learning rate and weight decay of every group, at the loaded position


def seed_at(seed: int, step: int) -> int:
    """The seed of fresh random states for a run that resumes at ``step`` without the saved ones."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_of_other_layout(engine: Any, checkpoint: Path) -> int | None:
    """``seed_at`` the checkpoint's step; None where its random states fit the engine's layout."""
    saved, now = read_state(checkpoint), engine.engine_config
    same = (
        saved.layout["tp"] == now.tensor_model_parallel_size and saved.layout["pp"] == now.pipeline_model_parallel_size
    )
    return None if same else seed_at(now.seed, saved.step)


class Writer:
    """A forked process that runs jobs one after another, on the memory of the moment of the fork.

    When this process ends, the writer is killed.
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
        """Wait until the process has ended. Returns what went wrong, or None."""
        said: str | None = None
        with suppress(EOFError):  # it ended without a message: it succeeded or was killed
            said = self._receiver.recv()
        self._process.join()
        if said is None and self._process.exitcode:
            return f"the process that wrote it ended with exit code {self._process.exitcode}"
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _work(jobs: Sequence[Callable[[], object]], sender: Any) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # the threads of the pool were not forked
    gc.disable()  # this process must not free the parent's device memory
    try:
        for job in jobs:
            job()
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def explain_failed_write(folder: str) -> Iterator[None]:
    """Turn Megatron's error of a failed write into a CheckpointError that names the causes.

    Megatron's error is outside of ``Exception``. All ranks raise it, but only the first one learns
    why.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()]
        raise CheckpointError(
            f"{folder} could not be written: {'; '.join(causes)[:500] or 'rank 0 says why'}"
        ) from error


class PendingSave:
    """A checkpoint whose files are being written. ``ended`` and ``finish`` are collective."""

    def __init__(self, folder: str, writer: Writer, finishers: Iterable[Callable[[], object]]) -> None:
        self._folder, self._writer, self._finishers = folder, writer, finishers

    def ended(self) -> bool:
        """Has every rank's writer ended?"""
        running: list[bool] = [True] * dist.get_world_size()
        dist.all_gather_object(running, self._writer.running)
        return not any(running)

    def finish(self) -> None:
        """Wait for every rank's writer, then write the files that describe the others.

        Raises CheckpointError on all ranks.
        """
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._writer.wait())
        found = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if found:
            raise CheckpointError(f"{self._folder} could not be written: {'; '.join(found)[:500]}")
        with explain_failed_write(self._folder):
            for finisher in self._finishers:
                finisher()

    def kill(self) -> None:
        """Give up the checkpoint on this rank."""
        self._writer.kill()


def save(engine: Any, folder: str, step: int) -> None:
    """Write a checkpoint. Collective. Raises CheckpointError."""
    apply_all(MEGATRON_PATCHES)
    with explain_failed_write(folder):
        engine.save_checkpoint(local_path=folder, global_step=step)
    checksums.record(Path(folder), dist.get_rank())


def start_save(engine: Any, folder: str, step: int) -> PendingSave:
    """Copy what is saved to the host and start a process beside each rank that writes it.

    Collective. The engine's checkpoint configuration must ask for asynchronous saves.
    """
    apply_all(MEGATRON_PATCHES)
    manager = engine.checkpoint_mananager
    jobs: list[Callable[[], object]] = []
    finishers: list[Callable[[], object]] = []

    def take_over(requests: Sequence[Any], finalize: Callable[[], object]) -> None:
        for request in requests:
            if request.async_fn is not None:
                arguments = list(request.async_fn_args)
                if request.preload_fn is not None:
                    arguments[1] = request.preload_fn()  # its tensors on the host, as Megatron's own callers do it
                jobs.append(partial(request.async_fn, *arguments, **request.async_fn_kwargs))
            finishers.extend(request.finalize_fns)
        finishers.append(finalize)

    def stage_weights(models: Any, weights_path: str) -> None:
        weights = [
            (name, tensor.detach().cpu()) if dist.get_rank() == 0 else None
            for name, tensor in engine.bridge.export_weights(engine.module)
        ]
        if dist.get_rank() == 0:
            jobs.append(partial(_write_weights, engine, weights, weights_path))

    adapters: Any = getattr(engine, "adapters", None)

    def stage_adapters(models: Any, weights_path: str) -> None:
        if job := adapters.staged(weights_path):
            jobs.append(job)

    manager._dispatch_finalize = take_over
    save_weights = engine.bridge.save_weights
    engine.bridge.save_weights = stage_weights if adapters is None else stage_adapters
    try:
        engine.save_checkpoint(local_path=folder, global_step=step)
    finally:
        del manager._dispatch_finalize
        engine.bridge.save_weights = save_weights
    jobs.append(partial(checksums.record, Path(folder), dist.get_rank()))
    return PendingSave(folder, Writer(jobs), finishers)


def _write_weights(engine: Any, weights: Sequence[Any], path: str) -> None:
    """Runs in the writer: the bridge's own writing, with weights that are already gathered.

    What training did not read of the model, and its config.json, are the source's own: verl and
    transformers write some of its fields anew, under names that older programs do not know.
    """
    source = Path(engine.bridge.safetensor_io.hf_dir)
    weights = weights if engine.is_value_model else [*weights, *untrained_copies(source, dict(weights))]
    engine.bridge.export_weights = lambda models: iter(weights)
    engine.bridge.save_weights(engine.module, path)
    if not engine.is_value_model:
        shutil.copyfile(source / "config.json", Path(path, "config.json"))


# ------------------------------------------------- all roles, in RL's driver


@contextmanager
def unwrap_worker_errors() -> Iterator[None]:
    """Raise a worker's ReToolError as the worker raised it, without Ray's wrapping."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ReToolError):
            raise error.cause from error
        raise


class WorkersSave:
    """The save in flight of all roles' workers; a ``saving.Pending``."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def ended(self) -> bool:
        return all(all(group.save_ended()) for group in self._groups)

    def finish(self) -> None:
        with unwrap_worker_errors():
            for group in self._groups:
                group.finish_save()

    def kill(self) -> None:
        """Does nothing: a failed run ends its workers, and each worker's writer ends with it."""
