"""Supervised fine-tuning: our training loop around verl's Megatron training worker.

We use only verl's worker, because verl's SFT trainer neither measures its steps nor writes
checkpoints atomically.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from retool_mcore.config import SftConfig
from retool_mcore.data.chat import TokenizedChat, end_of_turn
from retool_mcore.data.prompt_format import pin_date, record_format
from retool_mcore.data.sft import BatchesOfRank, load_sft, validation_batches
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.errors import ConfigError, ReToolError, RunError
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.platforms.network import use_loopback
from retool_mcore.process import die_with_parent, redirect_output
from retool_mcore.run import checkpoint, heartbeat, start
from retool_mcore.run.environment import fingerprint, require_equal_nodes, write_environment
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.metrics import MetricWriter, PhaseTimer, require_finite, step_rates
from retool_mcore.run.progress import progress
from retool_mcore.run.signals import EndedBySignal, StopSignals, exit_code
from retool_mcore.run.status import print_text, show_early_stage
from retool_mcore.train.watchdog import Watchdog
from retool_mcore.verl.keys.tree import sft_worker_config, worker_yaml
from retool_mcore.verl.plugin import assert_loaded

if TYPE_CHECKING:
    from retool_mcore.verl.sft_engine import SftEngine

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PEER_IS_GONE = (  # in the error messages of gloo and NCCL
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
)
LOCK_ERROR = "retool_lock_error"  # key in the rendezvous store; its value is rank 0's error, or ""


def train(config: SftConfig) -> None:
    """Train to ``train.steps``, resuming from the newest checkpoint.

    Every rank that torchrun starts calls it. Raises a subclass of ReToolError for errors that the
    user can fix.
    """
    die_with_parent()
    if config.cluster.nodes == 1:
        use_loopback()
    with ExitStack() as status, report_lost_rank():
        if os.environ.get("RANK") == "0":
            status.enter_context(show_early_stage("sft"))
        _require_world(config)
        store, rank, world = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        with locked_by_rank_0(store, rank, config.run.dir), own_tmpdir(config.run.dir, f".{rank}"):
            platform = get_platform(config.run.platform)
            first_of_node = os.environ["LOCAL_RANK"] == "0"
            with (
                redirect_output(config.run.dir / "logs" / f"sft_rank{rank}.log") as terminal,
                Watchdog(config, terminal, rank) if first_of_node else nullcontext(),
            ):
                platform.activate()
                assert_loaded()
                platform.set_device(int(os.environ["LOCAL_RANK"]))
                dist.init_process_group(
                    platform.device.comm_backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
                )
                status.close()
                try:
                    _run(config, platform, rank, Console(file=terminal))
                except EndedBySignal as ended:
                    if rank == 0:
                        print_text(Console(file=terminal), ended.message)
                    raise
                finally:
                    dist.destroy_process_group()


def _run(config: SftConfig, platform: Platform, rank: int, console: Console) -> None:
    """Train from the newest checkpoint to the last step; call with the run's folder locked."""
    timer = PhaseTimer()
    with progress(config, console) if rank == 0 else nullcontext(None) as show_resumed:
        begin_stage = partial(start.begin, config.run.dir) if rank == 0 else _ignore
        resume, engine, batches, val_batches = _prepare(config, platform, rank, console, timer, begin_stage=begin_stage)
        done = resume.step if resume is not None else 0
        if resume is not None:
            begin_stage("checkpoint")
            engine.load(resume.path)
        best = checkpoint.BestKeeper(config, done, writes=rank == 0)
        if checkpoint.lacks_value(config, done):  # killed before this validation, or best.metric is new
            best.record_validation(done, {"val_loss": engine.validation_loss(val_batches)})
        if done < config.train.steps:
            begin_stage("update")
        writer = None
        if show_resumed is not None:
            show_resumed(done)
            writer = MetricWriter(config, resumed_step=done)
            config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
        timer.flush()
        saver = checkpoint.Saver(config, engine.save, rank=rank, barrier=dist.barrier)
        stop_signal = 0
        with (
            closing(writer) if writer is not None else nullcontext(),
            StopSignals(config.checkpoint.grace_s, partial(_exit_now, rank)) as ending,
            saver,
        ):
            for step in range(done + 1, config.train.steps + 1):
                if best.stopped_early or stop_signal:
                    break
                with timer.span("data"):
                    sequences = batches(step)
                with timer.span("forward_backward"):
                    metrics = engine.train_batch(sequences)
                require_finite(metrics, step)
                stop_signal = _signal_of_any_rank(ending.first_signal)
                if stop_signal and config.saved_every:  # before a validation, for which there may be no time
                    with timer.span("save_checkpoint"):
                        saver.save(step)
                if _is_due(step, config.validation.every, config.train.steps):
                    with timer.span("validate"):
                        metrics["val_loss"] = engine.validation_loss(val_batches)
                    best.record_validation(step, metrics)
                    metrics |= best.metrics()
                if not stop_signal and _is_due(step, config.saved_every, config.train.steps):
                    with timer.span("save_checkpoint"):
                        saver.save(step)
                elif not stop_signal and saver.busy:
                    with timer.span("save_checkpoint"):
                        saver.poll()
                times = timer.flush()
                if writer is not None:
                    rates = step_rates(metrics, times, platform, config.cluster.num_gpus)
                    writer.write(step, metrics | rates | times)
        if stop_signal:
            raise EndedBySignal(stop_signal, saver.describe_kept())


def _prepare(
    config: SftConfig,
    platform: Platform,
    rank: int,
    console: Console,
    timer: PhaseTimer,
    *,
    begin_stage: Callable[[str], None],
) -> tuple[checkpoint.Saved | None, SftEngine, BatchesOfRank, list[list[TokenizedChat]]]:
    """The checkpoint to resume from, the model on its engine, and this rank's part of the data.

    Rank 0 also writes the files that describe the run. ``timer`` measures the optimizer's steps;
    ``begin_stage`` records the stages of the start.
    """
    from retool_mcore.verl.sft_engine import SftEngine, megatron_worker, time_optimizer

    chosen: list[Any] = [None, None]
    if rank == 0:
        day = pin_date(config.run.dir, config.model.path)
        begin_stage("data")
        heartbeat.start(config.run.dir)
        resume, notes = checkpoint.choose_resume(config)
        for note in notes:
            print_text(console, note)
        checkpoint.delete_incomplete(config)
        write_environment(config.run.dir, platform)  # before the model uses device memory
        chosen = [day, resume]
    dist.broadcast_object_list(chosen, src=0)  # the other ranks read a checkpoint only after rank 0's check
    if config.cluster.nodes > 1:
        nodes: list[dict[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(nodes, fingerprint(config) if os.environ["LOCAL_RANK"] == "0" else None)
        require_equal_nodes([node for node in nodes if node is not None])
    tokenizer = tokenizer_of(config.model, day=chosen[0])
    if rank == 0:
        record_format(config.run.dir, config.data_files[0][1], end_of_turn(tokenizer))
    data = load_sft(config.train_files, tokenizer, config.data.max_length_tokens)
    held_out = [load_sft([file], tokenizer, config.data.max_length_tokens) for file in config.validation.files]
    if rank == 0:
        for dataset in (data, *held_out):
            if note := dataset.dropped_note():
                print_text(console, f"note: {note}")
    begin_stage("model")
    worker_config = sft_worker_config(config, platform)
    if rank == 0:
        (config.run.dir / "verl.yaml").write_text(worker_yaml(worker_config), encoding="utf-8")
    worker = megatron_worker(config, worker_config)
    time_optimizer(worker.engine, platform, timer)
    engine = SftEngine(worker, config, platform)
    dp_rank, size, batch = engine.dp_rank, engine.dp_size, config.train.global_batch
    batches = BatchesOfRank(data.examples, batch, config.run.seed, size, dp_rank, hidden_size=engine.shape.hidden)
    return chosen[1], engine, batches, validation_batches(held_out, batch, dp_size=size, dp_rank=dp_rank)


def _ignore(stage: str) -> None:
    """Record no stage: only rank 0 does."""


def _require_world(config: SftConfig) -> None:
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world != config.cluster.num_gpus:
        raise ConfigError(
            f"{world or 'no'} processes were started, but [cluster] of {config.source} needs "
            f"{config.cluster.num_gpus} ({config.cluster.nodes} nodes x {config.cluster.gpus_per_node}). Start it with "
            f"torchrun --nproc-per-node {config.cluster.gpus_per_node} launch/sft_mcore.py {config.source}"
        )


def _signal_of_any_rank(own_signal: int) -> int:
    """The signal that asked any rank to stop, 0 if none. Collective; the same on all ranks."""
    device = torch.accelerator.current_accelerator(check_available=True)  # None means the CPU
    number = torch.tensor(own_signal, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def _exit_now(rank: int, stop_signal: int) -> None:
    """Exit the process even if the main thread waits in a collective for dead ranks."""
    if rank == 0:
        os.write(2, b"ended at once: the same command resumes from the newest complete checkpoint\n")
    os._exit(exit_code(stop_signal))


def _is_due(step: int, every: int, steps: int) -> bool:
    """True at every multiple of ``every`` and at the last step; never if ``every`` is 0."""
    return every > 0 and (step % every == 0 or step == steps)


class RankLost(RunError):
    """Another rank has died. A restart resumes from the newest checkpoint.

    The cause is in the other rank's error. On one node, torchrun usually kills this process before
    it can report this error.
    """


@contextmanager
def report_lost_rank() -> Generator[None]:
    """Turn torch's error for a dead rank or a dead rendezvous store into RankLost."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in PEER_IS_GONE)
        if isinstance(error, ReToolError) or not gone:
            raise
        raise RankLost("another rank has ended. Its error is the cause") from error


@contextmanager
def locked_by_rank_0(store: Store, rank: int, run_dir: Path) -> Generator[None]:
    """Rank 0 locks the run's folder. The other ranks wait until it has, then enter the block.

    Raises ConfigError on every rank if another process has the lock.
    """
    if rank != 0:
        if refused := store.get(LOCK_ERROR).decode():
            raise ConfigError(refused)
        yield
        return
    try:
        lock = lock_run(run_dir)
    except ConfigError as error:
        store.set(LOCK_ERROR, str(error))
        raise
    with lock:
        store.set(LOCK_ERROR, "")
        yield
