"""Loads a run's settings in the processes that verl starts.

All processes read the same file, the run's ``config.toml``, which every node can read. verl's
configuration tree passes its path to our trainer, agent loop, replay buffer and reward.
"""

from functools import lru_cache

from retool_mcore.config import RlConfig, load_config

RUN_CONFIG = "run_config"  # name of the argument in verl's tree that has the path


@lru_cache(maxsize=1)
def settings_of_run(path: str) -> RlConfig:
    """The settings of this process's run; reads the file at ``path`` only once."""
    return load_config(RlConfig, path)
