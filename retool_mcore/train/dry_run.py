"""``--dry-run``: resolves a run's settings through verl's own classes.

The report shows what differs from verl's defaults. Starts nothing and needs no device: a login node
can check a run for another machine.
"""

import os
from pathlib import Path
from typing import Any

from retool_mcore.config import RunConfig, SftConfig
from retool_mcore.data.chat import tokenizer_of
from retool_mcore.errors import PlatformError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import is_hub_name, read_config
from retool_mcore.platforms.base import Platform, get_platform, without_devices
from retool_mcore.preflight.protocols import check_protocols, data_is_here
from retool_mcore.verl.resolve import differences, resolve


def dry_run(config: RunConfig) -> str:
    """The report that ``--dry-run`` prints.

    Raises ConfigError for whatever would fail because of the settings alone.
    """
    platform = get_platform(config.run.platform)
    lacking: PlatformError | None = None
    try:
        platform.check_settings(config)  # it reads what the user exported, to which a platform adds its own
    except PlatformError as error:
        lacking = error
    notes = _prepare(platform)
    if lacking is not None:
        if not notes:
            raise lacking  # the run is for this machine, which lacks a package
        notes.append(str(lacking))
    here = Path(config.model.path).exists() or (is_hub_name(config.model.path) and read_config(config.model.path))
    if here:
        check_model(config)
    else:
        notes.append(f"model.path = {config.model.path} is not here: what depends on its shape is not checked")
    notes += _check_form(config)
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


def _check_form(config: RunConfig) -> list[str]:
    """Check that RL will accept what SFT makes of its rows, where model and data are here."""
    if not isinstance(config, SftConfig) or not Path(config.model.path).exists():
        return []
    if not data_is_here(config):
        return ["the data is not here: whether RL will accept the form of its rows is not checked"]
    check_protocols(config, tokenizer_of(config.model))
    return []


def _prepare(platform: Platform) -> list[str]:
    """Activate the platform in this process; else return why this machine could not run it."""
    try:
        platform.check_machine()
    except PlatformError as error:
        refusal = str(error)
    else:
        platform.activate()
        return []
    try:
        without_devices().activate()  # verl's classes are the same, and import on a machine without the device
    except PlatformError:
        os.environ["VERL_PLATFORM"] = "nvidia"
    return [f"this machine cannot start it: {refusal}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
