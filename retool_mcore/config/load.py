"""Turn a TOML file and command-line overrides into a checked configuration."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from retool_mcore.config.evaluation import EvaluationConfig
from retool_mcore.config.explain import explain
from retool_mcore.config.old_names import under_todays_names
from retool_mcore.config.rl import RlConfig
from retool_mcore.config.sft import SftConfig
from retool_mcore.config.shared import CONFIG_FILE, JobConfig
from retool_mcore.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=JobConfig)


def load_config(kind: type[ConfigT], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML run file, apply ``section.key=value`` overrides and validate it.

    The values of overrides are TOML (``train.steps=5``, ``sandbox.where=["local"]``); bare words
    are strings. A run's own config.toml may be of an earlier version, with that one's names. Raises
    ConfigError naming the file, the key, the value and the rule.
    """
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    recorded = os.path.basename(path) == CONFIG_FILE
    return build_config(kind, under_todays_names(tree) if recorded else tree, str(path), overrides)


def build_config(kind: type[ConfigT], tree: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> ConfigT:
    """Like ``load_config``, for a tree that is already parsed; errors name ``source``."""
    for override in overrides:
        _apply(tree, override)
    tree["source"] = source
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(kind, error, source, overrides)) from error


def load_evaluation(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> EvaluationConfig:
    """How an RL run scores its policy. Raises ConfigError like ``load_config``."""
    return EvaluationConfig.of(load_config(RlConfig, path, overrides))


def load_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> SftConfig | RlConfig:
    """Load an RL run if the file has a section [rollout], else an SFT run.

    Raises ConfigError like ``load_config``.
    """
    try:
        with open(path, "rb") as file:
            is_rl = "rollout" in tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        is_rl = False  # load_config reports what is wrong with the file
    return load_config(RlConfig, path, overrides) if is_rl else load_config(SftConfig, path, overrides)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if parts[0] == "verl_overrides":
        parts = ["verl_overrides", ".".join(parts[1:])]
    if not sign or len(parts) != 2 or not all(parts):
        raise ConfigError(f"{override!r} is not of the form section.key=value, for example train.steps=100")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tree.setdefault(parts[0], {})
    if not isinstance(table, dict):
        raise ConfigError(f"{override!r}: {parts[0]} is not a section of the configuration")
    table[parts[1]] = value
