"""Each key of verl that we set or refuse is a key of the installed verl."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.trainer import RUN_CONFIG_KEY
from retool_mcore.verl.keys.tree import RL_TABLES, SFT_TABLES, ppo_defaults


@pytest.fixture(scope="module")
def megatrons_classes() -> dict[str, type]:
    """A table of overrides -> Megatron-core's class that takes what stands in it."""
    get_platform("cpu").activate()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return {
        "override_transformer_config": TransformerConfig,
        "override_ddp_config": DistributedDataParallelConfig,
        "override_optimizer_config": OptimizerConfig,
    }


def fields(of: type) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


def known_to_megatron(path: str, classes: Mapping[str, type]) -> bool | None:
    """Whether an option of Megatron's is one; None for a key that is verl's own."""
    table, _, option = path.rpartition(".")
    found = classes.get(table.rpartition(".")[2])
    return None if found is None else option in fields(found)


def declared(tables: Any) -> list[str]:
    return [under + key.path for under, keys in tables for key in keys]


def test_each_key_of_rl_is_in_verls_tree(megatrons_classes: dict[str, type]):
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import reward
    from verl.workers.config import (
        AgentLoopConfig,
        HFModelConfig,
        McoreActorConfig,
        McoreCriticConfig,
        PolicyLossConfig,
        RolloutConfig,
    )

    assert 'get("reward_kwargs"' in inspect.getsource(reward)
    tree = ppo_defaults()
    unlisted = {  # keys that verl reads although its YAML lacks them
        RUN_CONFIG_KEY,  # ours
        "reward.custom_reward_function.reward_kwargs",
        *(f"actor_rollout_ref.actor.{name}" for name in fields(McoreActorConfig)),
        *(f"actor_rollout_ref.actor.policy_loss.{name}" for name in fields(PolicyLossConfig)),
        *(f"critic.{name}" for name in fields(McoreCriticConfig)),
        *(f"actor_rollout_ref.model.{name}" for name in fields(HFModelConfig)),
        *(f"actor_rollout_ref.rollout.{name}" for name in fields(RolloutConfig)),
        *(f"actor_rollout_ref.rollout.agent.{name}" for name in fields(AgentLoopConfig)),
        *(f"algorithm.rollout_correction.{name}" for name in fields(RolloutCorrectionConfig)),
        *(f"ray_kwargs.ray_init.{name}" for name in (*inspect.signature(ray.init).parameters, "runtime_env.env_vars")),
    }
    assert "kl_ctrl" in tree.algorithm and len(declared(RL_TABLES)) > 200
    missing = [
        path
        for path in declared(RL_TABLES)
        if not (known := known_to_megatron(path, megatrons_classes))
        and (known is False or (path not in unlisted and OmegaConf.select(tree, path, default=tree) is tree))
    ]
    assert not missing


def test_each_key_of_sft_is_a_field_of_verls_classes(megatrons_classes: dict[str, type]):
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    classes = {"engine": McoreEngineConfig, "optim": McoreOptimizerConfig, "model": HFModelConfig}
    missing = [
        path
        for path in declared(SFT_TABLES)
        if not (known := known_to_megatron(path, megatrons_classes))
        and (known is False or path.partition(".")[2] not in {"_target_", *fields(classes[path.partition(".")[0]])})
    ]
    assert not missing
