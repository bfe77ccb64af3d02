"""A run's settings in the processes that verl starts.

They travel in one form: the run's ``config.toml``, which every node sees. verl's tree names the
file to each of our parts there: trainer, agent loop, replay buffer and reward.
"""

from functools import lru_cache

from retool_mcore.config import RlConfig, load_config

RUN_CONFIG = "run_config"  # our parts' argument in verl's tree: the path of the file


@lru_cache(maxsize=1)
def settings_of_run(path: str) -> RlConfig:
    """The settings of the run that this process belongs to, read once."""
    return load_config(RlConfig, path)
