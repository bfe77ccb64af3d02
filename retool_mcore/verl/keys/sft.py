"""Builds the config dataclasses of verl 0.9.1's TrainingWorker from an SFT run's settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from retool_mcore.config import SftConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys.engine import MODEL, OPTIMIZER, SFT_BATCHES, megatron_keys
from retool_mcore.verl.keys.key import values
from retool_mcore.verl.keys.refused import SFT_KEYS, refuse

if TYPE_CHECKING:
    from verl.workers.config import TrainingWorkerConfig


def sft_worker_config(config: SftConfig, platform: Platform) -> TrainingWorkerConfig:
    """The configuration of verl's TrainingWorker. Raises ConfigError.

    Call ``platform.activate()`` first, because verl detects the device when it is imported.
    """
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig

    sections = sft_sections(config, platform)
    parts = sft_parts(config, platform, sections)
    try:
        model = HFModelConfig(**sections["model"])
    except TypeError as error:
        raise ConfigError(f"{config.source}: [verl_overrides] of SFT: {error}.") from error
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=parts["engine"],
        optimizer_config=parts["optim"],
        checkpoint_config=parts["checkpoint"],
    )


def sft_sections(config: SftConfig, platform: Platform) -> dict[str, dict[str, Any]]:
    """Keyword arguments of verl's dataclasses, with ``[verl_overrides]`` applied."""
    engine = megatron_keys(config, platform) | values(SFT_BATCHES, config, platform)
    sections = {
        "model": values(MODEL, config, platform),
        "engine": _tables(engine),
        "optim": _tables(values(OPTIMIZER, config, config.train.steps)),
    }
    refuse(config.verl_overrides, SFT_KEYS, config.source)
    for key, value in config.verl_overrides.items():
        _override(sections, key, value, config.source)
    return sections


def _tables(keys: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys into nested dicts, which verl's dataclasses take."""
    tables: dict[str, Any] = {}
    for path, value in keys.items():
        table, _, name = path.rpartition(".")
        if table:
            tables.setdefault(table, {})[name] = value
        else:
            tables[name] = value
    return tables


def sft_parts(config: SftConfig, platform: Platform, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """verl's dataclasses except HFModelConfig, whose constructor reads the model's files."""
    from hydra.utils import get_class
    from verl.workers.config import McoreOptimizerConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    try:
        return {
            "engine": get_class(platform.training.engine_config_class)(**sections["engine"]),
            "optim": McoreOptimizerConfig(**sections["optim"]),
            "checkpoint": McoreCheckpointConfig(async_save=config.checkpoint.asynchronous),
        }
    except TypeError as error:  # a dataclass raises it for an unknown field
        raise ConfigError(f"{config.source}: [verl_overrides] of SFT: {error}.") from error


def _override(sections: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a key of ``[verl_overrides]`` in ``sections``. Raises ConfigError for unknown tables."""
    *path, name = key.split(".")
    table: Any = sections
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    if not path or not isinstance(table, dict):
        raise ConfigError(
            f"{source}: [verl_overrides] {key} of an SFT run starts with one of {', '.join(sections)}, for example "
            "engine.override_transformer_config.apply_rope_fusion."
        )
    table[name] = value


def sft_tree(config: SftConfig, platform: Platform) -> str:
    """The settings of verl's TrainingWorker as YAML, with defaults. Does not read the model."""
    parts = sft_parts(config, platform, sft_sections(config, platform))
    return yaml.safe_dump({name: asdict(part) for name, part in parts.items()}, sort_keys=False)


def sft_defaults() -> str:
    """The defaults of verl's dataclasses, in the same form as ``sft_tree``."""
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    parts = {"engine": McoreEngineConfig(), "optim": McoreOptimizerConfig(), "checkpoint": McoreCheckpointConfig()}
    return yaml.safe_dump({name: asdict(part) for name, part in parts.items()}, sort_keys=False)
