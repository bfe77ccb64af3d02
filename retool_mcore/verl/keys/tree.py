"""Builds the configuration of verl 0.9.1 from a run's settings and the tables of verl/keys.

RL has the Hydra tree of verl's PPO trainer, SFT the dataclasses of verl's TrainingWorker. Each key
path appears once, in one of the tables. [verl_overrides] may not set a key that our settings
control: it would silently contradict the settings that the sampler, the schedule and the metrics
use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys import trainer
from retool_mcore.verl.keys.algorithm import ALGORITHM, ENGINE_LOG_PROB
from retool_mcore.verl.keys.engine import MEGATRON, MODEL, OPTIMIZER, SFT_BATCHES, TRANSFORMER, megatron_keys
from retool_mcore.verl.keys.key import (
    ACTOR_PREFIX,
    CRITIC_PREFIX,
    REFERENCE_PREFIX,
    ROLLOUT_PREFIX,
    Key,
    refused,
    values,
)
from retool_mcore.verl.keys.rollout import ASYNC, ROLLOUT, SAMPLER, rollout_keys

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import TrainingWorkerConfig

Tables = tuple[tuple[str, tuple[Key, ...]], ...]
# Prefix in verl's tree -> table of keys.
SFT_TABLES: Tables = (("engine.", SFT_BATCHES), ("engine.", MEGATRON), ("optim.", OPTIMIZER), ("model.", MODEL))
RL_TABLES: Tables = (
    *((f"{role}megatron.", MEGATRON) for role in (ACTOR_PREFIX, REFERENCE_PREFIX, CRITIC_PREFIX)),
    *((f"{role}optim.", OPTIMIZER) for role in (ACTOR_PREFIX, CRITIC_PREFIX)),
    ("actor_rollout_ref.model.", MODEL),
    (ACTOR_PREFIX, trainer.ACTOR_KEYS),
    (ROLLOUT_PREFIX, ROLLOUT),
    *(("", table) for table in (ALGORITHM, SAMPLER, ASYNC, trainer.CRITIC_KEYS, trainer.REWARD, trainer.DATA)),
    *(("", table) for table in (trainer.TRAINER, trainer.RAY, trainer.RESUME)),
)


# ------------------------------------------------- keys that [verl_overrides] may not set


def _refused_keys(tables: Tables) -> dict[str, str]:
    """Refused keys -> our setting; later tables win, as for the critic's learning rate."""
    return {path: setting for under, keys in tables for path, setting in refused(keys, under=under).items()}


SFT_KEYS, RL_KEYS = _refused_keys(SFT_TABLES), _refused_keys(RL_TABLES)
ENGINE_LOG_PROB_KEYS = refused(ENGINE_LOG_PROB)


def refuse(overrides: Mapping[str, Any], decided: Mapping[str, str], source: str) -> None:
    """Raise one ConfigError for all keys of [verl_overrides] that our settings control.

    ``decided``: verl's key -> our setting. Also refuses a table that contains such a key, and a key
    below one.
    """
    refused_keys = {key: setting for key in overrides if (setting := decided_by(key, decided))}
    if refused_keys:
        listed = "; ".join(
            f"{key} = {overrides[key]!r} (controlled by {setting})" for key, setting in refused_keys.items()
        )
        raise ConfigError(
            f"{source}: [verl_overrides] may not set {listed}. Remove the key; if a setting controls it, change that."
        )


def decided_by(key: str, decided: Mapping[str, str]) -> str | None:
    """Our settings that control verl's ``key``, or None."""
    if key in decided:
        return decided[key]
    above = [ours for ours in decided if key.startswith(f"{ours}.")]
    if above:
        return decided[max(above, key=len)]
    below = {decided[ours]: None for ours in decided if ours.startswith(f"{key}.")}
    return " and ".join(below) or None


# ------------------------------------------------- RL


def ppo_defaults() -> DictConfig:
    """verl's default tree for its PPO trainer with Megatron engines."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(folder, version_base=None):
        tree = compose("ppo_trainer", overrides=["model_engine=megatron"])
    OmegaConf.set_struct(tree, True)
    return tree


def check_ppo_tree(tree: DictConfig) -> None:
    """Check the tree with verl's config classes and ``validate_config``.

    Raises ConfigError with verl's message.
    """
    from hydra.errors import InstantiationException
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    resolved = OmegaConf.create(OmegaConf.to_container(tree, resolve=True))
    try:
        for part in ("actor", "rollout"):
            omega_conf_to_dataclass(resolved.actor_rollout_ref[part])
        validate_config(resolved, need_reference_policy(resolved), need_critic(resolved))
    except (InstantiationException, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"verl refuses the resolved settings: {error}. Correct the setting or the key of [verl_overrides]."
        ) from error


def ppo_tree(config: RlConfig, platform: Platform, resume: Path | None = None) -> DictConfig:
    """verl's complete, resolved tree for its PPO trainer.

    ``resume``: folder of a complete checkpoint, or None. Raises ConfigError if a key of
    ``[verl_overrides]`` is not in verl's tree, or if one of our settings controls it.
    """
    import verl
    from omegaconf import OmegaConf

    decided = RL_KEYS | (ENGINE_LOG_PROB_KEYS if config.algorithm.old_log_prob == "rollout" else {})
    refuse(config.verl_overrides, decided, config.source)
    tree = ppo_defaults()
    for key, value in (ppo_keys(config, platform) | values(trainer.RESUME, resume)).items():
        # force_add: verl's YAML lacks some documented keys (arguments of Ray and of the engines).
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    for key, value in config.verl_overrides.items():
        if OmegaConf.select(tree, key, default=tree) is tree and not _is_megatron_option(key, platform):
            raise ConfigError(
                f"{config.source}: [verl_overrides] {key} is not a key of verl {verl.__version__}. "
                "Correct or remove it."
            )
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    return tree


def _is_megatron_option(key: str, platform: Platform) -> bool:
    """Whether the key is one of Megatron's options; verl's tree lists few but passes on any."""
    table, _, option = key.rpartition(".")
    return table.endswith(TRANSFORMER) and platform.has_transformer_option(option)


def ppo_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    """The keys of verl's PPO trainer that we set."""
    run = (config, platform)
    return {
        **values(ALGORITHM, config),
        **values(MODEL, *run, under="actor_rollout_ref.model."),
        **values(trainer.ACTOR_KEYS, *run, under=ACTOR_PREFIX),
        **_engine_keys(ACTOR_PREFIX, config, platform),
        **_optimizer_keys(ACTOR_PREFIX, config, config.critic.warmup_steps),
        **(_critic_keys(config, platform) if config.algorithm.name == "ppo" else {}),
        **(_engine_keys(REFERENCE_PREFIX, config, platform) if config.algorithm.kl_coef else {}),
        **rollout_keys(config, platform),
        **values((*SAMPLER, *trainer.REWARD, *trainer.DATA, *trainer.TRAINER, *trainer.RAY), *run),
        **(values(ASYNC, *run) if config.train.mode == "async" else {}),
    }


def _critic_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    engine = _engine_keys(CRITIC_PREFIX, config, platform) | _optimizer_keys(CRITIC_PREFIX, config)
    return engine | values(trainer.CRITIC_KEYS, config, platform)


def _engine_keys(role: str, config: RlConfig, platform: Platform) -> dict[str, Any]:
    """The engine keys of a role, such as "critic."; every role has the same Megatron layout."""
    keys = {"_target_": platform.training.engine_config_class, **megatron_keys(config, platform)}
    return {f"{role}megatron.{key}": value for key, value in keys.items()}


def _optimizer_keys(role: str, config: RlConfig, idle_steps: int = 0) -> dict[str, Any]:
    """The optimizer keys of a role; ``idle_steps``: first steps in which it is not trained."""
    updates = (config.train.steps - idle_steps) * config.train.updates_per_step
    return values(OPTIMIZER, config, updates, under=f"{role}optim.")


def run_config_of(tree: DictConfig) -> str:
    """The path of the run's settings, from verl's tree."""
    from omegaconf import OmegaConf

    return str(OmegaConf.select(tree, trainer.RUN_CONFIG_KEY))


# ------------------------------------------------- SFT


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
        raise ConfigError(
            f"{config.source}: verl does not accept a key of [verl_overrides]: {error}. Correct or remove it."
        ) from error
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
    optimizer = values(OPTIMIZER, config, config.train.steps)
    sections = {"model": values(MODEL, config, platform), "engine": _nested(engine), "optim": _nested(optimizer)}
    refuse(config.verl_overrides, SFT_KEYS, config.source)
    for key, value in config.verl_overrides.items():
        _override(sections, key, value, config.source)
    return sections


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys into nested dicts, which verl's dataclasses take."""
    tables: dict[str, Any] = {}
    for path, value in keys.items():
        table, _, name = path.rpartition(".")
        under = tables.setdefault(table, {}) if table else tables
        under[name] = value
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
        raise ConfigError(
            f"{config.source}: verl does not accept a key of [verl_overrides]: {error}. Correct or remove it."
        ) from error


def _override(sections: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set a key of ``[verl_overrides]`` in ``sections``. Raises ConfigError for unknown tables."""
    *path, name = key.split(".")
    table: Any = sections
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    if not path or not isinstance(table, dict):
        raise ConfigError(
            f"{source}: [verl_overrides] {key}: unknown table. Start with one of {', '.join(sections)}, for example "
            "engine.override_transformer_config.apply_rope_fusion."
        )
    table[name] = value


def sft_tree(config: SftConfig, platform: Platform) -> str:
    """The settings of verl's TrainingWorker as YAML, with defaults. Does not read the model."""
    return _as_yaml(sft_parts(config, platform, sft_sections(config, platform)))


def worker_yaml(config: TrainingWorkerConfig) -> str:
    """A worker's configuration in the form of ``sft_tree``."""
    parts = {"engine": config.engine_config, "optim": config.optimizer_config, "checkpoint": config.checkpoint_config}
    return _as_yaml(parts)


def sft_defaults() -> str:
    """The defaults of verl's dataclasses, in the same form as ``sft_tree``."""
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    parts = {"engine": McoreEngineConfig(), "optim": McoreOptimizerConfig(), "checkpoint": McoreCheckpointConfig()}
    return _as_yaml(parts)


def _as_yaml(parts: Mapping[str, Any]) -> str:
    return yaml.safe_dump({name: asdict(part) for name, part in parts.items()}, sort_keys=False)
