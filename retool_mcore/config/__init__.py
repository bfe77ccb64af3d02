"""The schema of a run: one complete TOML file, strict, read once, written back beside the run.

Token counts end in ``_tokens``, times in ``_s``, sizes in ``_mb``. The TOML file that sets a value,
not this schema, says whether it comes from the paper or from a measurement.
"""

from retool_mcore.config.load import build_config, load_config, load_run
from retool_mcore.config.rl import Algorithm, RlConfig, RlTrain, Rollout
from retool_mcore.config.sft import SftConfig
from retool_mcore.config.shared import Memory, Parallel, RunConfig

__all__ = [
    "Algorithm",
    "Memory",
    "Parallel",
    "RlConfig",
    "RlTrain",
    "Rollout",
    "RunConfig",
    "SftConfig",
    "build_config",
    "load_config",
    "load_run",
]
