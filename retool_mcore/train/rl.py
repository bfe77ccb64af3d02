"""Reinforcement learning: check the settings and hand over to verl's PPO trainer under Ray."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO

from rich.console import Console

from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import get_platform
from retool_mcore.preflight.start import check_data, check_run
from retool_mcore.process import exit_on_sigterm, output_to
from retool_mcore.run import checkpoint
from retool_mcore.run.export import export_at_end
from retool_mcore.run.folder import lock_run
from retool_mcore.run.metrics import read_metrics
from retool_mcore.run.progress import bar_of_steps
from retool_mcore.verl.plugin import assert_loaded

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5


def train(config: RlConfig) -> None:
    """Run to ``train.steps``, resuming from the newest checkpoint.

    Returns when the last step is saved. Raises ReToolError subclasses for whatever the user can
    fix.
    """
    exit_on_sigterm()
    require_cluster(config)
    platform = get_platform(config.run.platform)
    check_run(config, platform)
    with lock_run(config.run.dir), output_to(config.run.dir / "logs" / "rl.log") as terminal:
        platform.activate()
        assert_loaded()
        resume = checkpoint.find_resume(config)
        if resume is not None:
            checkpoint.tell_changed_settings(resume, config, Console(file=terminal))
        for note in check_data(config):
            logger.warning(note)
            Console(file=terminal).print(note, markup=False, highlight=False, soft_wrap=True)
        if resume is None or resume.step < config.train.steps:
            from retool_mcore.verl.runner import run  # verl and Ray, after the platform is activated

            with _progress(config, terminal):
                run(config, platform, resume.path if resume is not None else None)
        export_at_end(config)


def require_cluster(config: RlConfig) -> None:
    """Raise ConfigError when the run is for several nodes and no Ray cluster was started for it."""
    if config.cluster.nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"{config.source}: cluster.nodes = {config.cluster.nodes}, and RAY_ADDRESS names no Ray cluster. Start "
            "a script of launch/ or ascend/ on each node, which starts Ray first."
        )


@contextmanager
def _progress(config: RlConfig, terminal: IO[str]) -> Generator[None]:
    """A progress bar that follows the metrics file, which the driver actor writes."""
    path, ended = config.run.dir / "metrics.jsonl", threading.Event()
    with bar_of_steps(Console(file=terminal)) as progress:
        bar = progress.add_task("rl  starting Ray, Megatron and the rollout engine", total=config.train.steps)

        def follow() -> None:
            rows = read_metrics(path) if path.exists() else []
            if rows:
                text = f"rl  reward {rows[-1]['reward']:+.3f}"
                progress.update(bar, completed=rows[-1]["step"], description=text)

        def watch() -> None:
            while not ended.wait(PROGRESS_INTERVAL_S):
                follow()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            follow()
