"""Which kind of run a TOML file describes, for commands that take either."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence

from retool_mcore.config import RlConfig, SftConfig, load_config


def load_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> SftConfig | RlConfig:
    """A file with a section [rollout] is an RL run, any other an SFT run. Raises ConfigError like ``load_config``."""
    try:
        with open(path, "rb") as file:
            is_rl = "rollout" in tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        is_rl = False  # load_config says what is wrong with the file
    return load_config(RlConfig, path, overrides) if is_rl else load_config(SftConfig, path, overrides)
