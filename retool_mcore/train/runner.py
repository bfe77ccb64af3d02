"""The Ray actor that drives an RL run: verl's own, with our trainer registered in its process."""

from __future__ import annotations

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1

# verl hands its task runner out as a Ray actor class; a subclass needs the plain class behind it.
_TaskRunner = TaskRunnerV1.__ray_metadata__.modified_class


@ray.remote
class ReToolTaskRunner(_TaskRunner):
    """Passed to verl's ``run_ppo``, which takes a recipe's own task runner."""

    def run(self, config: DictConfig) -> None:
        from retool_mcore.train import (
            replicas,
            trainer,  # noqa: F401  registers ReToolTrainer with verl
        )

        replicas.register()
        _TaskRunner.run(self, config)
