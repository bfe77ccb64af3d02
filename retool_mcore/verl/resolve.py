"""Resolves a run's settings with verl's classes and lists differences from verl's defaults.

Needs no device.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.ppo import check_ppo_tree, ppo_defaults, ppo_tree
from retool_mcore.verl.keys.sft import sft_defaults, sft_tree

MISSING = "(not set)"


def resolve(config: RunConfig, platform: Platform) -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's defaults and this run's settings, as nested dicts. Raises ConfigError."""
    from omegaconf import OmegaConf

    if isinstance(config, SftConfig):
        return yaml.safe_load(sft_defaults()), yaml.safe_load(sft_tree(config, platform))
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    tree = ppo_tree(config, platform)
    check_ppo_tree(tree)
    defaults: Any = OmegaConf.to_container(ppo_defaults(), resolve=False)
    # Compare both before interpolation, so that a default that refers to another key is not listed
    # as a difference.
    ours: Any = OmegaConf.to_container(tree, resolve=False)
    return defaults, ours


def differences(defaults: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (default, ours) of every leaf that differs; MISSING if one side lacks it."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*defaults, *ours)):
        default, mine = defaults.get(key, MISSING), ours.get(key, MISSING)
        if isinstance(mine, Mapping) and mine:
            inner = default if isinstance(default, Mapping) else {}
            found |= differences(inner, mine, f"{prefix}{key}.")
        elif default != mine:
            found[f"{prefix}{key}"] = (default, mine)
    return found
