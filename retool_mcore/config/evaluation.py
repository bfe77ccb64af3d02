"""Settings of `retool eval`: the machine, the tool loop and the problems, without training."""

from __future__ import annotations

from retool_mcore.config.rl import Reward, RlConfig
from retool_mcore.config.sampling import HeldOut, Prompts, SandboxSettings, ToolLoop
from retool_mcore.config.shared import JobConfig


class EvaluationConfig(JobConfig):
    """The settings of an evaluation. Of [reward], it reads only function and timeout_s."""

    data: Prompts
    rollout: ToolLoop
    validation: HeldOut
    sandbox: SandboxSettings = SandboxSettings()
    reward: Reward = Reward()

    @classmethod
    def of(cls, run: RlConfig) -> EvaluationConfig:
        """The evaluation that samples and scores as the run's validation does."""
        return cls(**{name: getattr(run, name) for name in cls.model_fields})
