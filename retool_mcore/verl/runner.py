"""Runs RL through verl: writes the settings into the run's folder, joins Ray, drives the steps."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from retool_mcore.config import RlConfig
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.rollout_engines import ENGINES
from retool_mcore.platforms.stores import MASTER_PORT_PATCH
from retool_mcore.process import exit_on_sigterm
from retool_mcore.run.environment import write_environment
from retool_mcore.run.memory_kills import MemoryKills
from retool_mcore.run.start import begin
from retool_mcore.verl import trainer  # noqa: F401  registers our trainers with verl
from retool_mcore.verl.failure import error_for_user, with_memory
from retool_mcore.verl.keys.ppo import ppo_tree, run_config_of
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.trainer import RAY_INIT
from retool_mcore.verl.ray_cluster import Join
from retool_mcore.verl.rl_metrics import measure_sglang

# verl exports its task runner as a Ray actor class; a subclass needs the plain class behind it.
_TaskRunner = TaskRunnerV1.__ray_metadata__.modified_class


class Driver(_TaskRunner):
    """verl's task runner, in the process that joins Ray.

    ``run_ppo`` would make it an actor, which imports all of the trainer once more. It has no
    devices: verl's nsys option reaches the workers, not this process.
    """

    def run(self, config: DictConfig) -> None:
        exit_on_sigterm()  # Ray has put its own handler there
        begin(Path(run_config_of(config)).parent, "driver")
        if ENGINES[config.actor_rollout_ref.rollout.name].own_server:
            measure_sglang()
        MASTER_PORT_PATCH.apply()
        super().run(config)

    def options(self, **_: Any) -> Driver:
        """As of a Ray actor class; see ``remote``."""
        return self

    def remote(self) -> Any:
        """What ``run_ppo`` asks of a Ray actor class: an object with ``run.remote(config)``."""
        return SimpleNamespace(run=SimpleNamespace(remote=lambda config: ray.put(self.run(config))))


def with_own_environment(joined: dict[str, Any], tree: DictConfig) -> DictConfig:
    """What joins Ray, with the user's own runtime_env before ours; None is verl's default."""
    own = OmegaConf.select(tree, f"{RAY_INIT}runtime_env") or {}
    given = {"runtime_env": {name: value for name, value in own.items() if value is not None}}
    return cast("DictConfig", OmegaConf.merge(joined, given))


def run(config: RlConfig, platform: Platform, resume_from: Path | None, join: Join) -> None:
    """Join Ray and run to ``train.steps``.

    Writes both forms of the settings, ours and verl's, into the run's folder. Raises ReToolError as
    a worker raised it, and RunError when a process of the run died or failed.
    """
    tree = ppo_tree(config, platform, resume_from)
    write_settings(config)
    (config.run.dir / "verl.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True), encoding="utf-8")
    write_environment(config.run.dir, platform)
    begin(config.run.dir, "ray")
    kills = MemoryKills()
    try:
        if joined := join():  # else RAY_ADDRESS names the cluster
            tree.ray_kwargs.ray_init = with_own_environment(joined, tree)
        run_ppo(tree, task_runner_class=Driver())
    except BaseException as error:
        if isinstance(error, RayError):
            traceback.print_exception(error)  # to the run's log
        traceback.clear_frames(error.__traceback__)  # ends verl's bar, which has its last word in the log, too
        told = with_memory(error_for_user(error, config) if isinstance(error, RayError) else error, kills)
        if told is not error:
            raise told from error
        raise
    finally:
        ray.shutdown()
