"""The schema of a run: one complete TOML file, strict, read once, written back beside the run.

Token counts end in ``_tokens``, times in ``_s``, sizes in ``_mb``. A value that comes from the
paper or from a measured fact says so in the TOML file, where it is chosen, not here.
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
