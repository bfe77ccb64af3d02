"""[verl_overrides] may not say what a setting of ours says: the error names the setting, in RL and
in SFT. Each key that we set or refuse is a key of the installed verl.
"""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.tree import ENGINE_LOG_PROB_KEYS, RL_KEYS, RL_TABLES, decided_by, ppo_tree, sft_sections

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ROOT = Path(__file__).parents[3]
RL, SFT = ROOT / "configs" / "rl_tiny_cpu.toml", ROOT / "configs" / "sft_tiny_cpu.toml"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
OPTIONS = f"{ACTOR}megatron.override_transformer_config."


def tree_of(*words: str, platform: str = "cpu") -> Any:
    return ppo_tree(load_config(RlConfig, RL, words), get_platform(platform))


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        (ACTOR + "use_rollout_log_probs", "true", 'algorithm.old_log_prob = "actor" or "rollout"'),
        (ACTOR + "optim.override_optimizer_config", "{adam_beta1=0.5}", "optim.betas"),
        ("critic.optim.lr", "1.0", "critic.lr"),
        (ROLLOUT + "top_k", "50", "training, whose log-probs assume samples from all tokens"),
        (ROLLOUT + "val_kwargs", "{n=3}", "the section [validation]"),
        ("trainer.v1.sampler.sampler_kwargs.run_config", "mine.toml", "[rollout], [train] and [validation]"),
        ("data.custom_cls.path", "mine.py", "controlled by this trainer's code for that part of verl"),
        (ACTOR + "megatron.vanilla_mbridge", "true", "controlled by this trainer's code"),
        ("actor_rollout_ref.model.lora.rank", "8", "controlled by the section [lora]"),
    ],
)
def test_a_raw_key_that_a_setting_decides_is_refused_by_its_name(key: str, value: str, setting: str):
    with pytest.raises(ConfigError) as caught:
        tree_of(f"verl_overrides.{key}={value}")
    assert str(RL) in str(caught.value)
    assert f"[verl_overrides] may not set {key} = " in str(caught.value) and setting in str(caught.value)


def test_sft_refuses_its_own():
    config = load_config(SftConfig, SFT, ["verl_overrides.optim.betas=[0.5,0.6]", "verl_overrides.engine.dtype=int8"])
    message = r"controlled by optim.betas\); engine.dtype = 'int8' \(controlled by model.dtype"
    with pytest.raises(ConfigError, match=message):
        sft_sections(config, get_platform("cpu"))


def test_what_nothing_of_ours_decides_may_be_set():
    raw = {
        ROLLOUT + "agent.agent_loop_config_path": "mine.yaml",  # perf/bench.py's
        ROLLOUT + "max_num_batched_tokens": 22528,  # the shipped configurations'
        ACTOR + "entropy_coeff": 0.1,
        ACTOR + "policy_loss.ppo_kl_coef": 0.2,
        OPTIONS + "attention_backend": "auto",
    }
    words = [f"verl_overrides.{key}={value}" for key, value in raw.items()]
    tree = tree_of(*words)
    assert {key: OmegaConf.select(tree, key) for key in raw} == raw
    message = r"may not set .*policy_loss\.ppo_kl_coef = 0.2 \(controlled by algorithm.old_log_prob"
    with pytest.raises(ConfigError, match=message):
        tree_of(*words, "algorithm.old_log_prob=rollout")


# Keys with our value that [verl_overrides] may change, although the value depends on the run or its
# platform.
FREE = {
    *(f"{role}megatron.override_ddp_config" for role in (ACTOR, "actor_rollout_ref.ref.", "critic.")),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",  # perf/bench.py takes another loop
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine",
    "ray_kwargs.ray_init.runtime_env.env_vars",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
}


def test_every_key_whose_value_a_setting_decides_is_refused_raw():
    """A raw key would silently contradict the setting."""
    free = {under + key.path for under, table in RL_TABLES for key in table if key.decided_by is None}
    computed = {under + key.path for under, table in RL_TABLES for key in table if callable(key.value)}
    decided = RL_KEYS | ENGINE_LOG_PROB_KEYS
    assert {key for key in free & computed if decided_by(key, decided) is None} == FREE


def test_a_key_that_megatron_does_not_have_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"\[verl_overrides\] .*\.moe_permute_fusionn is not a key of verl"):
        tree_of(f"verl_overrides.{OPTIONS}moe_permute_fusionn=true")
    # MindSpeed's own options are known where MindSpeed is.
    words = f"verl_overrides.{OPTIONS}use_flash_attn=true"
    assert OmegaConf.select(tree_of(words, platform="ascend"), f"{OPTIONS}use_flash_attn") is True
    with pytest.raises(ConfigError, match="use_flash_attn is not a key of verl"):
        tree_of(words)
