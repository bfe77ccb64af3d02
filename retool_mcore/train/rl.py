"""Reinforcement learning: checks the settings and starts verl's PPO trainer on Ray."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform, engine_environment, get_platform
from retool_mcore.platforms.network import use_loopback
from retool_mcore.preflight.check import CheckScope, check, require
from retool_mcore.process import exit_on_sigterm, redirect_output, standard_exit_code
from retool_mcore.run import start
from retool_mcore.run.checkpoint import choose_resume, is_finished, is_last
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.progress import progress
from retool_mcore.run.signals import EndedBySignal
from retool_mcore.run.status import print_text, show_early_stage
from retool_mcore.sandbox.supervisor.slots import remove_stale
from retool_mcore.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

CLUSTER_WAIT_S = 20.0  # a Ray head needs a few seconds to start


def train(config: RlConfig) -> None:
    """Train to ``train.steps``, resuming from the newest checkpoint.

    Returns after the last step is saved. Raises a subclass of ReToolError for errors that the user
    can fix.
    """
    exit_on_sigterm()
    if config.cluster.nodes == 1:
        use_loopback()
    with show_early_stage("rl"):
        require_cluster(config)
        platform = get_platform(config.run.platform)
        platform.activate()  # before transformers is imported, which detects installed packages only once
        notes = [] if is_finished(config) else require(check(config, CheckScope(platform=platform)))
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
        except EndedBySignal as ended:
            print_text(console, ended.message)
            raise


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
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after the run's end must not start another cluster
    with standard_exit_code(), Watchdog(config, console.file) as watchdog:
        from retool_mcore.verl.plugin import assert_loaded  # may import Ray, so only after use_loopback

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
