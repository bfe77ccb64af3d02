"""``--dry-run``: resolves a run's settings with verl's classes and reports them.

The report lists the differences from verl's defaults. It starts nothing and needs no device, so a
login node can check a run for another machine.
"""

import os
from collections.abc import Mapping
from typing import Any

import yaml

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import WITHOUT_DEVICES, Platform, get_platform
from retool_mcore.preflight.check import CheckScope, check, require
from retool_mcore.verl.keys.tree import check_ppo_tree, ppo_defaults, ppo_tree, sft_defaults, sft_tree

MISSING = "(not set)"


def dry_run(config: RunConfig) -> str:
    """The report that ``--dry-run`` prints.

    Raises ConfigError for settings that would fail on any machine.
    """
    platform = get_platform(config.run.platform)
    scope = CheckScope(platform=platform, is_target=False)
    problems = check(config, scope)  # before the platform changes the environment
    notes = [*_prepare(platform), *require(problems)]
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


def _prepare(platform: Platform) -> list[str]:
    """Activate the platform in this process.

    If this machine cannot run it, activates platform cpu instead and returns a note.
    """
    try:
        platform.check_machine()
    except PlatformError as error:
        refusal = str(error)
    else:
        platform.activate()
        return []
    try:
        get_platform(WITHOUT_DEVICES).activate()  # so that verl imports; its config classes are the same
    except PlatformError:
        os.environ["VERL_PLATFORM"] = "nvidia"
    return [f"this machine cannot start the run: {refusal}"]


def resolve(config: RunConfig, platform: Platform) -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's defaults and this run's settings, as nested dicts. Raises ConfigError.

    Needs no device.
    """
    from omegaconf import OmegaConf

    if isinstance(config, SftConfig):
        return yaml.safe_load(sft_defaults()), yaml.safe_load(sft_tree(config, platform))
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    tree = ppo_tree(config, platform)
    check_ppo_tree(tree)
    # Compare both before interpolation, so that a default that refers to another key is not listed
    # as a difference.
    defaults: Any = OmegaConf.to_container(ppo_defaults(), resolve=False)
    settings: Any = OmegaConf.to_container(tree, resolve=False)
    return defaults, settings


def differences(
    defaults: Mapping[str, Any], settings: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (default, setting) of every leaf that differs; MISSING if one side lacks it."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*defaults, *settings)):
        default, value = defaults.get(key, MISSING), settings.get(key, MISSING)
        if isinstance(value, Mapping) and value:
            below = default if isinstance(default, Mapping) else {}
            changed |= differences(below, value, f"{prefix}{key}.")
        elif default != value:
            changed[f"{prefix}{key}"] = (default, value)
    return changed


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
