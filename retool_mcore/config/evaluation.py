"""What `retool eval` needs to know: a machine, the loop, the problems; nothing of training."""

from __future__ import annotations

from retool_mcore.config.rl import Reward, RlConfig
from retool_mcore.config.sampling import HeldOut, Prompts, SandboxSettings, ToolLoop
from retool_mcore.config.shared import JobConfig


class EvaluationConfig(JobConfig):
    """Of [reward] an evaluation uses timeout_s."""

    data: Prompts
    rollout: ToolLoop
    validation: HeldOut
    sandbox: SandboxSettings = SandboxSettings()
    reward: Reward = Reward()

    @classmethod
    def of(cls, run: RlConfig) -> EvaluationConfig:
        """As the run's own validation samples and judges."""
        return cls(**{name: getattr(run, name) for name in cls.model_fields})
