"""The schema of a run file. A run writes its resolved settings to its folder.

Names of token counts end in ``_tokens``, times in ``_s``, sizes in ``_mb``. Comments in the run
files, not this schema, state whether a value comes from the paper or from a measurement.
"""

from retool_mcore.config.algorithm import Algorithm
from retool_mcore.config.evaluation import EvaluationConfig
from retool_mcore.config.experts import Experts
from retool_mcore.config.load import build_config, load_config, load_evaluation, load_run
from retool_mcore.config.rl import RlConfig, RlTrain
from retool_mcore.config.sampling import SandboxSettings, ToolLoop
from retool_mcore.config.sft import SftConfig
from retool_mcore.config.shared import JobConfig, Memory, Parallel, RunConfig

__all__ = [
    "Algorithm",
    "EvaluationConfig",
    "Experts",
    "JobConfig",
    "Memory",
    "Parallel",
    "RlConfig",
    "RlTrain",
    "RunConfig",
    "SandboxSettings",
    "SftConfig",
    "ToolLoop",
    "build_config",
    "load_config",
    "load_evaluation",
    "load_run",
]
