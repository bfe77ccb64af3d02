"""Runs RL through verl: writes the settings into the run's folder, starts Ray, drives the steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.workers.rollout.replica import RolloutReplicaRegistry

from retool_mcore.config import RlConfig
from retool_mcore.errors import RunError
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.rollout_engines import ENGINES
from retool_mcore.process import exit_on_sigterm, without_hangups
from retool_mcore.run.environment import write_environment
from retool_mcore.run.start import begin
from retool_mcore.verl import step  # noqa: F401  registers our trainers with verl
from retool_mcore.verl.failure import error_for_user
from retool_mcore.verl.keys.ppo import ppo_tree, run_config_of
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.ray_cluster import ray_arguments
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.watch import ProcessWatch

# verl exports its task runner as a Ray actor class; a subclass needs the plain class behind it.
_remote: Any = TaskRunnerV1
_TaskRunner: Any = _remote.__ray_actor_class__

# Asks the function now and then for the error of a process that has died, and ends the run with it.
Watch = Callable[[Callable[[], RunError | None]], AbstractContextManager[None]]


class Driver(_TaskRunner):
    """verl's task runner, in the process that starts Ray.

    ``run_ppo`` would make it an actor, which imports all of the trainer once more. It has no
    devices: verl's nsys option reaches the workers, not this process.
    """

    has_ray = False

    def run(self, config: DictConfig) -> None:
        self.has_ray = True
        exit_on_sigterm()  # Ray has put its own handler there
        settings = settings_of_run(run_config_of(config))
        self._run_dir = settings.run.dir
        begin(self._run_dir, "driver")
        register_engine(settings, config.actor_rollout_ref.rollout.name)
        super().run(config)

    def init_agent_loop_manager(self) -> None:
        begin(self._run_dir, "agent_loops")
        super().init_agent_loop_manager()

    def options(self, **_: Any) -> Driver:
        """As of a Ray actor class; see ``remote``."""
        return self

    def remote(self) -> Any:
        """What ``run_ppo`` asks of a Ray actor class: an object with ``run.remote(config)``."""
        return SimpleNamespace(run=SimpleNamespace(remote=lambda config: ray.put(self.run(config))))


def register_engine(config: RlConfig, name: str) -> None:
    """Have verl start our SGLang servers instead of its own, and write when it starts engines.

    Importing SGLang takes up to 20 s. A thread does it while the workers build the model.
    """
    importing = ThreadPoolExecutor(1).submit(replica_class, name, RolloutReplicaRegistry._registry[name])

    def load() -> type:
        if not config.rollout.gpus:  # engines with their own devices start later: RlRun._load_checkpoint
            begin(config.run.dir, "engines")
        return importing.result()

    RolloutReplicaRegistry.register(name, load)


def replica_class(name: str, verls_loader: Callable[[], type]) -> type:
    """Our replica of the engine if there is one, else verl's."""
    verls = verls_loader()  # installs what verl's SGLang modules need before they can be imported
    if not ENGINES[name].own_server:
        return verls
    from retool_mcore.verl.sglang_server import MeasuredReplica

    return MeasuredReplica


def run(config: RlConfig, platform: Platform, resume_from: Path | None, watch: Watch) -> None:
    """Start or join Ray and run to ``train.steps``; ``watch`` ends the run when a process has died.

    Writes both forms of the settings, ours and verl's, into the run's folder. Raises ReToolError as
    a worker raised it, and RunError when Ray does not start or a process of the run died or failed.
    """
    tree = ppo_tree(config, platform, resume_from)
    write_settings(config)
    (config.run.dir / "verl.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True), encoding="utf-8")
    write_environment(config.run.dir, platform)
    with ray_arguments(config) as arguments:
        with open_dict(tree):
            tree.ray_kwargs.ray_init = {**tree.ray_kwargs.get("ray_init", {}), **arguments}
        _run(config, tree, watch)


def _run(config: RlConfig, tree: DictConfig, watch: Watch) -> None:
    begin(config.run.dir, "ray")
    driver = Driver()
    try:
        with (
            watch(ProcessWatch(config).lost),
            without_hangups(),
        ):  # Ray's processes would end before the driver has saved
            run_ppo(tree, task_runner_class=driver)
    except BaseException as error:
        if isinstance(error, RayError):
            traceback.print_exception(error)  # to the run's log
        traceback.clear_frames(error.__traceback__)  # ends verl's bar, which has its last word in the log, too
        if isinstance(error, RayError):
            raise error_for_user(error, config) from error
        if isinstance(error, Exception) and config.cluster.nodes == 1 and not driver.has_ray:
            log = config.run.dir / "logs" / "rl.log"
            raise RunError(f"Ray did not start: {error} {log} has more. The same command tries again.") from error
        raise
    finally:
        ray.shutdown()
