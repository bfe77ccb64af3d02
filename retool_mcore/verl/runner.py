"""Runs RL through verl: writes the settings into the run's folder and starts our Ray actor."""

from __future__ import annotations

from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayTaskError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from retool_mcore.config import RlConfig
from retool_mcore.errors import ReToolError
from retool_mcore.platforms.base import Platform
from retool_mcore.run.environment import write_environment
from retool_mcore.run.start import begin
from retool_mcore.verl.keys.ppo import ppo_tree, run_config_of
from retool_mcore.verl.keys.rollout import write_settings

# verl exports its task runner as a Ray actor class; a subclass needs the plain class behind it.
_TaskRunner = TaskRunnerV1.__ray_metadata__.modified_class


@ray.remote
class ReToolTaskRunner(_TaskRunner):
    """Passed to verl's ``run_ppo``, which accepts a recipe's own task runner."""

    def run(self, config: DictConfig) -> None:
        from retool_mcore.verl import trainer  # noqa: F401  registers ReToolTrainer with verl
        from retool_mcore.verl.rl_metrics import measure_sglang

        begin(Path(run_config_of(config)).parent, "driver")
        if config.actor_rollout_ref.rollout.name == "sglang":
            measure_sglang()
        _TaskRunner.run(self, config)


def run(config: RlConfig, platform: Platform, resume_from: Path | None) -> None:
    """Start Ray and run to ``train.steps``.

    Writes both forms of the settings, ours and verl's, into the run's folder. Raises ReToolError as
    the driver actor raised it, and ray.exceptions.RayTaskError for all else.
    """
    tree = ppo_tree(config, platform, resume_from)
    write_settings(config)
    (config.run.dir / "verl.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True), encoding="utf-8")
    write_environment(config.run.dir, platform)
    begin(config.run.dir, "ray")
    try:
        run_ppo(tree, task_runner_class=ReToolTaskRunner)
    except RayTaskError as error:
        if isinstance(error.cause, ReToolError):
            raise error.cause from error  # raised in the driver actor, meant for the user
        raise
    finally:
        ray.shutdown()
