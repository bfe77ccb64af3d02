"""Reinforcement learning: checks the settings and starts verl's PPO trainer on Ray."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform, engine_environment, get_platform
from retool_mcore.platforms.network import keep_to_loopback
from retool_mcore.preflight.check import Machine, check, require
from retool_mcore.process import exit_on_sigterm, redirect_output, standard_exit_code
from retool_mcore.report.warnings import AlarmLines
from retool_mcore.run import start
from retool_mcore.run.best import best_so_far
from retool_mcore.run.checkpoint import choose_resume, is_finished, is_last
from retool_mcore.run.ending import Ended
from retool_mcore.run.export import closing_lines, export_at_end
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.status import (
    StartStages,
    StepLines,
    bar_of_steps,
    notes_on,
    print_commands,
    print_text,
    show_early_stage,
)
from retool_mcore.sandbox.supervisor.slots import remove_stale
from retool_mcore.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

CLUSTER_WAIT_S = 20.0  # a Ray head needs a few seconds to start
PROGRESS_INTERVAL_S = 0.5
REWARD = "critic/rewards/mean"


def train(config: RlConfig) -> None:
    """Train to ``train.steps``, resuming from the newest checkpoint.

    Returns after the last step is saved. Raises a subclass of ReToolError for errors that the user
    can fix.
    """
    exit_on_sigterm()
    if config.cluster.nodes == 1:
        keep_to_loopback()
    with show_early_stage("rl"):
        require_cluster(config)
        platform = get_platform(config.run.platform)
        platform.activate()  # before transformers is imported, which detects installed packages only once
        notes = [] if is_finished(config) else require(check(config, Machine(platform=platform)))
    with (
        lock_run(config.run.dir),
        own_tmpdir(config.run.dir, clean=partial(remove_stale, young_s=0)),  # workers are killed with their sandboxes
        redirect_output(config.run.dir / "logs" / "rl.log") as terminal,
    ):
        console = Console(file=terminal)
        start.begin(config.run.dir, "checks")
        try:
            with progress(config, console) as show_resumed:
                _run(config, platform, console, notes, show_resumed)
        except Ended as ended:
            print_text(console, ended.message)
            raise
        if (best := best_so_far(config, config.train.steps)) and best.given_up:
            print_text(console, f"note: {best.summary()}")
        export_at_end(config)
        print_commands(console, closing_lines(config))


def _run(
    config: RlConfig,
    platform: Platform,
    console: Console,
    notes: Sequence[str],
    show_resumed: Callable[[int], None],
) -> None:
    """Train from the newest checkpoint to the last step."""
    resume, notes_on_resume = choose_resume(config)
    step = resume.step if resume is not None else 0
    show_resumed(step)
    for note in (*notes, *notes_on_resume):
        logger.warning(note)  # to the run's log
        print_text(console, note)
    if is_last(config, step):
        return
    os.environ.update(engine_environment(config.rollout))  # inherited by this node's processes
    with standard_exit_code(), Watchdog(config, console.file) as watchdog:
        from retool_mcore.verl.plugin import assert_loaded  # may import Ray, so only after keep_to_loopback

        assert_loaded()
        from retool_mcore.verl.runner import run  # imports verl and Ray, so only after platform.activate

        run(config, platform, resume.path if resume is not None else None, watchdog.polling)


def require_cluster(config: RlConfig, wait_s: float = CLUSTER_WAIT_S) -> None:
    """Raise ConfigError if a run on several nodes finds no Ray cluster in ``wait_s`` seconds."""
    if config.cluster.nodes == 1:
        return
    several = f"{config.source}: cluster.nodes = {config.cluster.nodes}, but RAY_ADDRESS"
    what_to_do = "Start a script of launch/ or ascend/ on each node, which starts Ray first."
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise ConfigError(f"{several} is not set. {what_to_do}")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "://" in host:
        raise ConfigError(f"{several} = {address!r} is not the HOST:PORT of a Ray cluster. {what_to_do}")
    end_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(wait_s, 0.1)).close()
        except (OSError, OverflowError) as problem:
            if time.monotonic() < end_s:
                time.sleep(0.2)
                continue
            raise ConfigError(f"{several} = {address!r} does not answer ({problem}). {what_to_do}") from problem
        return


@contextmanager
def progress(config: RlConfig, console: Console) -> Generator[Callable[[int], None]]:
    """Show the stages of the start, then the steps, as the driver writes them to the run's files.

    In a terminal this is a progress bar, which stays on screen if the run made a step. Elsewhere it
    prints a line per stage and step. Yields a function that sets the step from which the run
    resumes.
    """
    path, ended = config.run.dir / "metrics.jsonl", threading.Event()
    alarm_lines = AlarmLines(console, config)
    lines = StepLines(console, config.train.steps)
    earlier = {row.get("unix_s") for row in read_metrics(path)} if path.exists() else set[float | None]()
    last_shown = 0
    with notes_on(console), bar_of_steps(console) as bars:
        bar = bars.add_task("rl", total=config.train.steps)
        stages = StartStages(config.run.dir, bars, bar)

        def follow(*, over: bool = False) -> bool:
            """Show new stages and steps; returns whether this process has finished a step.

            ``over``: the run has ended without an error.
            """
            nonlocal last_shown
            rows = read_metrics(path) if path.exists() else []
            stepped = bool(rows) and rows[-1].get("unix_s") not in earlier
            stages.show(over=over or stepped)
            if stepped:
                reward = f"  reward {rows[-1][REWARD]:+.3f}" if REWARD in rows[-1] else ""
                bars.update(bar, completed=rows[-1]["step"], description=f"rl{reward}")
            if stepped and rows[-1]["step"] > last_shown:
                last_shown = int(rows[-1]["step"])
                lines.print(rows[-1])
                alarm_lines.print(rows)
            return stepped

        def watch() -> None:
            while not ended.wait(PROGRESS_INTERVAL_S):
                follow()

        follow()
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        well = False
        try:
            yield lambda step: bars.update(bar, completed=step)
            well = True
        finally:
            ended.set()
            watcher.join()
            bars.live.transient = not follow(over=well)
