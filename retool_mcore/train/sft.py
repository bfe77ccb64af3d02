"""Supervised fine-tuning: our training loop around verl's Megatron training worker.

We use only verl's worker, because verl's SFT trainer neither measures its steps nor writes
checkpoints atomically.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from retool_mcore.config import SftConfig
from retool_mcore.config.files import parquet_files
from retool_mcore.data.chat import Rendered, end_of_turn
from retool_mcore.data.prompt_format import date_of, format_of_file, pin_date
from retool_mcore.data.sft import PackedBatches, SftDataset, load_sft
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.platforms.network import keep_to_loopback
from retool_mcore.process import die_with_parent, exit_on_sigterm, redirect_output
from retool_mcore.report.warnings import AlarmLines
from retool_mcore.run import alive, checkpoint, saving, start
from retool_mcore.run.best import BestKeeper
from retool_mcore.run.ending import Ended, Ending, exit_code
from retool_mcore.run.environment import differing, fingerprint, write_environment
from retool_mcore.run.export import closing_lines, export_at_end
from retool_mcore.run.folder import own_tmpdir
from retool_mcore.run.metrics import MetricWriter, PhaseTimer, require_finite, token_rates
from retool_mcore.run.status import (
    StartStages,
    StepLines,
    bar_of_steps,
    notes_on,
    print_commands,
    print_text,
    show_early_stage,
)
from retool_mcore.train.ranks import locked_by_rank_0, rank_loss_reported
from retool_mcore.train.watchdog import Watchdog
from retool_mcore.verl.checkpoint import seed_at
from retool_mcore.verl.keys.tree import sft_tree
from retool_mcore.verl.plugin import assert_loaded

if TYPE_CHECKING:
    from retool_mcore.verl.sft_engine import SftEngine

START_POLL_S = 0.5
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def train(config: SftConfig) -> None:
    """Train to ``train.steps``, resuming from the newest checkpoint.

    Every rank that torchrun starts calls it. Raises a subclass of ReToolError for errors that the
    user can fix.
    """
    die_with_parent()
    if config.cluster.nodes == 1:
        keep_to_loopback()
    with ExitStack() as status, rank_loss_reported():
        if os.environ.get("RANK") == "0":
            status.enter_context(show_early_stage("sft"))
        _require_world(config)
        platform = get_platform(config.run.platform)
        store, rank, world = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        log = config.run.dir / "logs" / f"sft_rank{rank}.log"
        with (
            locked_by_rank_0(store, rank, config.run.dir),
            own_tmpdir(config.run.dir, f".{rank}"),
            redirect_output(log) as terminal,
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
            except Ended as ended:
                if rank == 0:
                    print_text(Console(file=terminal), ended.message)
                raise
            finally:
                dist.destroy_process_group()


def _run(config: SftConfig, platform: Platform, rank: int, console: Console) -> None:
    """Train, then export; call after rendezvous, with the run's folder locked."""
    _begin_stage(config, rank, "data")
    chosen: list[checkpoint.Saved | None] = [None]
    if rank == 0:
        chosen[0], notes = checkpoint.choose_resume(config)
        for note in notes:
            print_text(console, note)
        pin_date(config.run.dir, config.model.path)
        write_environment(config.run.dir, platform)  # before the model uses device memory
        alive.belong_to(config.run.dir)
    # Other ranks read checkpoints and the date only after rank 0 has checked and written them.
    dist.broadcast_object_list(chosen, src=0)
    _require_equal_nodes(config)
    first_of_node = os.environ["LOCAL_RANK"] == "0"
    report = Reporter(config, console) if rank == 0 else None
    with (
        notes_on(console),
        Watchdog(config, console.file, rank) if first_of_node else nullcontext(),
        report or nullcontext(),
    ):
        _loop(config, platform, rank, console, resume=chosen[0], report=report)
    if rank == 0:
        exit_on_sigterm()  # a SIGTERM during the export removes the partial export
        export_at_end(config)
        print_commands(console, closing_lines(config))


def _begin_stage(config: SftConfig, rank: int, stage: str) -> None:
    if rank == 0:
        start.begin(config.run.dir, stage)


def _require_world(config: SftConfig) -> None:
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world != config.cluster.num_gpus:
        raise ConfigError(
            f"{world or 'no'} processes were started, but [cluster] of {config.source} needs "
            f"{config.cluster.num_gpus} ({config.cluster.nodes} nodes x {config.cluster.gpus_per_node}). Start it with "
            f"torchrun --nproc-per-node {config.cluster.gpus_per_node} launch/sft_mcore.py {config.source}"
        )


def _require_equal_nodes(config: SftConfig) -> None:
    """Raise ConfigError on every rank if a node differs from node 0.

    Compares settings, code, packages, data and model files.
    """
    if config.cluster.nodes == 1:
        return
    prints: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(config) if os.environ["LOCAL_RANK"] == "0" else None)
    if different := differing([found for found in prints if found is not None]):
        raise ConfigError(f"the nodes differ: {'; '.join(different)}. Use the same on every node.")


def print_left_out_rows(files: Sequence[SftDataset], max_length_tokens: int, console: Console) -> None:
    """Print a note for each file with rows that are not trained on."""
    for data in files:
        if note := data.dropped_note(max_length_tokens):
            print_text(console, f"note: {note}")


def _loop(
    config: SftConfig,
    platform: Platform,
    rank: int,
    console: Console,
    *,
    resume: checkpoint.Saved | None,
    report: Reporter | None,
) -> None:
    timer = PhaseTimer()
    engine, batches, val_batches = _set_up(config, platform, timer, console if rank == 0 else None)
    done = resume.step if resume is not None else 0
    if resume is not None:
        _begin_stage(config, rank, "checkpoint")
        new_seed = None if resume.has_random_states_of(config) else seed_at(config.run.seed, done)
        engine.load(str(resume.path / "actor"), new_seed=new_seed)
    best = BestKeeper(config, done, writes=rank == 0)
    if best.lacks(done):  # best.metric was added to the run
        best.validated(done, {"val_loss": engine.validation_loss(val_batches)})
    if report is not None:
        report.resume_after(done)
        saving.delete_incomplete(config)
        config.run.config_file.write_text(config.to_toml(), encoding="utf-8")
    timer.flush()
    saver = saving.Saver(config, engine.save, rank=rank, barrier=dist.barrier)
    stop_signal = 0
    with Ending(config.checkpoint.grace_s, partial(_end_at_once, rank)) as ending, saver:
        for step in range(done + 1, config.train.steps + 1):
            if best.given_up or stop_signal:
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
                best.validated(step, metrics)
                metrics |= best.metrics()
            if not stop_signal and _is_due(step, config.saved_every, config.train.steps):
                with timer.span("save_checkpoint"):
                    saver.save(step)
            elif not stop_signal and saver.busy:
                with timer.span("save_checkpoint"):
                    saver.poll()
            times = timer.flush()
            if report is not None:
                report(step, metrics | step_rates(metrics, times, platform) | times)
    if stop_signal:
        raise Ended(stop_signal, saver.describe_kept())
    if rank == 0 and best.given_up:
        print_text(console, f"note: {best.summary()}")


def _set_up(
    config: SftConfig, platform: Platform, timer: PhaseTimer, console: Console | None
) -> tuple[SftEngine, PackedBatches, list[list[Rendered]]]:
    """The model on its engine, and this rank's part of the data; ``console``: rank 0's."""
    from retool_mcore.verl.sft_engine import SftEngine, megatron_worker, time_optimizer

    tokenizer = tokenizer_of(config.model, day=date_of(config.run.dir, config.model.path))
    if console is not None:
        prompt_format = format_of_file(parquet_files(config.data.train_file)[0])
        prompt_format.write(config.run.dir, end_of_turn(tokenizer))
    data = load_sft(config.data.train_file, tokenizer, config.data.max_length_tokens)
    held_out = [load_sft(file, tokenizer, config.data.max_length_tokens) for file in config.validation.files]
    if console is not None:
        print_left_out_rows((data, *held_out), config.data.max_length_tokens, console)
        start.begin(config.run.dir, "model")
        (config.run.dir / "verl.yaml").write_text(sft_tree(config, platform), encoding="utf-8")
    worker = megatron_worker(config, platform)
    time_optimizer(worker.engine, platform, timer)
    engine = SftEngine(worker, config, platform)
    rank, size = engine.dp_rank, engine.dp_size
    batch = config.train.global_batch
    batches = PackedBatches(data.examples, batch, config.run.seed, size, rank, hidden_size=engine.shape.hidden)
    return engine, batches, validation_batches(held_out, batch, dp_size=size, dp_rank=rank)


def _signal_of_any_rank(own_signal: int) -> int:
    """The signal that asked any rank to stop, 0 if none. Collective; the same on all ranks."""
    number = torch.tensor(own_signal, device=torch.accelerator.current_accelerator())  # None means the CPU
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def _end_at_once(rank: int, stop_signal: int) -> None:
    """Exit the process even if the main thread waits in a collective for dead ranks."""
    if rank == 0:
        os.write(2, b"ended at once: the same command resumes from the newest complete checkpoint\n")
    os._exit(exit_code(stop_signal))


def _is_due(step: int, every: int, steps: int) -> bool:
    """True at every multiple of ``every`` and at the last step; never if ``every`` is 0."""
    return every > 0 and (step % every == 0 or step == steps)


def step_rates(metrics: Mapping[str, float], times: Mapping[str, float], platform: Platform) -> dict[str, float]:
    """Token rates of the step, and the MFU of its update without validation and checkpoints."""
    found = token_rates(metrics["perf/total_num_tokens"], times, dist.get_world_size())
    if platform.device.peak_flops:
        work_s = sum(times[f"timing_s/{name}"] for name in ("data", "forward_backward", "optimizer"))
        found["mfu"] = metrics["flops"] / (platform.device.peak_flops * dist.get_world_size() * work_s)
    busy_percent = platform.gpu_percent()
    return found if busy_percent is None else found | {"gpu_percent": busy_percent}


def validation_batches(
    files: Sequence[SftDataset], global_batch: int, *, dp_size: int, dp_rank: int
) -> list[list[Rendered]]:
    """This rank's part of all rows of ``files``, in batches.

    A batch has about ``global_batch`` rows over all ranks. Raises DataError if there are fewer rows
    than ranks.
    """
    examples = [example for data in files for example in data.examples]
    if len(examples) < dp_size:
        names = ", ".join(data.source for data in files)
        raise DataError(f"{names} has {len(examples)} usable rows, fewer than the {dp_size} data-parallel ranks")
    num_batches = max(1, len(examples) // global_batch)
    bounds = [len(examples) * i // num_batches for i in range(num_batches + 1)]
    return [list(examples[start + dp_rank : end : dp_size]) for start, end in pairwise(bounds)]


class Reporter:
    """Rank 0's output: start stages, a progress bar or lines for the steps, and metric files."""

    def __init__(self, config: SftConfig, console: Console) -> None:
        self._config, self._writer = config, None
        self._progress = bar_of_steps(console)
        self._bar = self._progress.add_task("sft", total=config.train.steps)
        self._stages = StartStages(config.run.dir, self._progress, self._bar)
        self._lines = StepLines(console, config.train.steps)
        self._alarm_lines = AlarmLines(console, config)
        self._stepped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._stages.show()
        self._progress.start()
        self._thread.start()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._progress.live.transient = not self._stepped.is_set()
        self._stepped.set()
        self._thread.join()
        self._stages.show(over=failed is None)
        self._progress.stop()
        if self._writer is not None:
            self._writer.close()

    def resume_after(self, step: int) -> None:
        """Set the step from which the run continues; its next row of metrics is ``step`` + 1."""
        if step < self._config.train.steps:
            start.begin(self._config.run.dir, "update")
        self._writer = MetricWriter(self._config, resumed_step=step)
        self._progress.update(self._bar, completed=step)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None, "resume_after comes before the first step"
        if not self._stepped.is_set():
            self._start_is_over()
            metrics = {**metrics, **start.start_times(self._config.run.dir)}
        self._writer.write(step, metrics)
        self._progress.update(self._bar, completed=step, description=f"sft  loss {metrics['loss']:.4f}")
        self._lines.print({"step": step, **metrics})
        self._alarm_lines.print([{"step": step, **metrics}])

    def _follow(self) -> None:
        while not self._stepped.wait(START_POLL_S):
            self._stages.show()

    def _start_is_over(self) -> None:
        self._stepped.set()
        self._thread.join()
        self._stages.show(over=True)
