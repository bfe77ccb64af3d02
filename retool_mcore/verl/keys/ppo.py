"""Builds the Hydra tree of verl 0.9.1's PPO trainer from an RL run's settings.

verl composes its defaults, and this module overrides them key by key. Each key path appears once,
in one of the tables of verl/keys.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError
from retool_mcore.platforms.base import Platform
from retool_mcore.verl.keys import trainer
from retool_mcore.verl.keys.algorithm import algorithm_keys
from retool_mcore.verl.keys.engine import MODEL, OPTIMIZER, TRANSFORMER, megatron_keys
from retool_mcore.verl.keys.key import values
from retool_mcore.verl.keys.refused import ACTOR, CRITIC, ENGINE_LOG_PROB_KEYS, REFERENCE, RL_KEYS, refuse
from retool_mcore.verl.keys.rollout import ASYNC, SAMPLER, rollout_keys

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
        raise ConfigError(f"verl refuses the resolved settings: {error}") from error


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
        if OmegaConf.select(tree, key, default=tree) is tree and not _is_of_megatron(key, platform):
            raise ConfigError(
                f"{config.source}: [verl_overrides] {key} is not a key of verl {verl.__version__}'s tree."
            )
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    return tree


def _is_of_megatron(key: str, platform: Platform) -> bool:
    """Whether the key is an option of Megatron's; verl's tree lists few but passes on any."""
    table, _, option = key.rpartition(".")
    return table.endswith(TRANSFORMER) and platform.has_transformer_option(option)


def ppo_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    run = (config, platform)
    return {
        **algorithm_keys(config),
        **values(MODEL, *run, under="actor_rollout_ref.model."),
        **values(trainer.ACTOR, *run, under=ACTOR),
        **_engine_keys(ACTOR, config, platform),
        **_optimizer_keys(ACTOR, config, config.critic.warmup_steps),
        **(_critic_keys(config, platform) if config.algorithm.name == "ppo" else {}),
        **(_engine_keys(REFERENCE, config, platform) if config.algorithm.kl_coef else {}),
        **rollout_keys(config, platform),
        **values((*SAMPLER, *trainer.REWARD, *trainer.DATA, *trainer.TRAINER, *trainer.RAY), *run),
        **(values(ASYNC, *run) if config.train.mode == "async" else {}),
    }


def _critic_keys(config: RlConfig, platform: Platform) -> dict[str, Any]:
    engine = _engine_keys(CRITIC, config, platform) | _optimizer_keys(CRITIC, config)
    return engine | values(trainer.CRITIC, config, platform)


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
