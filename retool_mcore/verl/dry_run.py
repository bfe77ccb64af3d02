"""``--dry-run``: a run's settings resolved through verl's own classes, and what differs from verl's defaults.

Starts nothing and needs no device: a login node can do it for a machine it is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.errors import PlatformError
from retool_mcore.model.check import check_model
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.verl.keys.ppo import check_ppo_tree, ppo_defaults, ppo_tree
from retool_mcore.verl.keys.sft import sft_defaults, sft_tree

MISSING = "(not set)"


def dry_run(config: RunConfig) -> str:
    """The report that ``--dry-run`` prints. Raises ConfigError for whatever would fail for its settings alone."""
    platform = get_platform(config.run.platform)
    notes = _prepare(platform)
    try:
        platform.check_settings(config)
    except PlatformError as error:
        if not notes:
            raise  # this machine was meant, and lacks a package
        notes.append(str(error))
    if Path(config.model.path).exists():
        check_model(config)
    else:
        notes.append(f"model.path = {config.model.path} is not here: what depends on its shape is not checked")
    defaults, tree = resolve(config, platform)
    changed = differences(defaults, tree)
    lines = [
        f"# {config.source}: {type(config).__name__.removesuffix('Config').upper()} on platform {platform.name}, "
        f"{config.cluster.nodes} x {config.cluster.gpus_per_node} devices. Nothing was started.",
        *(f"# note: {note}" for note in notes),
        *(f"# raw verl key, [verl_overrides]: {key} = {value!r}" for key, value in config.verl_overrides.items()),
        f"# {len(changed)} settings differ from verl's defaults:",
        *(f"{key}: {_short(default)} -> {_short(ours)}" for key, (default, ours) in changed.items()),
    ]
    return "\n".join(lines)


def resolve(config: RunConfig, platform: Platform) -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's defaults and this run's settings, both resolved, as plain nested dicts."""
    from omegaconf import OmegaConf

    if isinstance(config, SftConfig):
        return yaml.safe_load(sft_defaults()), yaml.safe_load(sft_tree(config, platform))
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    tree = ppo_tree(config, platform)
    check_ppo_tree(tree)
    defaults: Any = OmegaConf.to_container(ppo_defaults(), resolve=False)
    # Both unresolved: a default that refers to another setting is not a setting of this run. Ours are resolved after.
    ours: Any = OmegaConf.to_container(tree, resolve=False)
    return defaults, ours


def differences(defaults: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (default, ours) of every leaf that differs; MISSING where one side has no such key."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*defaults, *ours)):
        default, mine = defaults.get(key, MISSING), ours.get(key, MISSING)
        if isinstance(mine, Mapping) and mine:
            inner = default if isinstance(default, Mapping) else {}
            found |= differences(inner, mine, f"{prefix}{key}.")
        elif default != mine:
            found[f"{prefix}{key}"] = (default, mine)
    return found


def _prepare(platform: Platform) -> list[str]:
    """Make this process the platform's where the machine allows it; else say why it could not run here."""
    try:
        platform.check_machine()
    except PlatformError as error:
        refusal = str(error)
    else:
        platform.activate()
        return []
    try:
        get_platform("cpu").activate()  # verl's classes are the same, and import on a machine without the device
    except PlatformError:
        os.environ["VERL_PLATFORM"] = "nvidia"
    return [f"this machine cannot start it: {refusal}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
