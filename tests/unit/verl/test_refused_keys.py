"""[verl_overrides] may not say what a setting of ours says: the error names the setting, in RL and
in SFT.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.tree import (
    ENGINE_LOG_PROB_KEYS,
    RL_KEYS,
    SFT_KEYS,
    decided_by,
    ppo_keys,
    ppo_tree,
    sft_sections,
)

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ROOT = Path(__file__).parents[3]
RL, SFT = ROOT / "configs" / "rl_tiny_cpu.toml", ROOT / "configs" / "sft_tiny_cpu.toml"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        (ACTOR + "use_rollout_log_probs", "true", 'algorithm.old_log_prob = "actor" or "rollout"'),
        (ACTOR + "optim.override_optimizer_config", "{adam_beta1=0.5}", "optim.betas"),
        ("critic.optim.lr", "1.0", "critic.lr"),
        (ROLLOUT + "top_k", "50", "training, whose log-probs assume samples from all tokens"),
        (ROLLOUT + "val_kwargs", "{n=3}", "the section [validation]"),
        ("trainer.v1.sampler.sampler_kwargs.run_config", "mine.toml", "[rollout], [train] and [validation]"),
        ("data.custom_cls.path", "mine.py", "this trainer's code for that part of verl controls it"),
        ("data.train_max_samples", "8", "this trainer's code for that part of verl controls it"),
        ("actor_rollout_ref.model.lora.rank", "8", "the section [lora] controls it"),
    ],
)
def test_a_raw_key_that_a_setting_decides_is_refused_by_its_name(key: str, value: str, setting: str):
    config = load_config(RlConfig, RL, [f"verl_overrides.{key}={value}"])
    with pytest.raises(ConfigError) as caught:
        ppo_tree(config, get_platform("cpu"))
    assert str(RL) in str(caught.value)
    assert f"[verl_overrides] refuses {key} = " in str(caught.value) and f"{setting}" in str(caught.value)


def test_sft_refuses_its_own():
    config = load_config(SftConfig, SFT, ["verl_overrides.optim.betas=[0.5,0.6]", "verl_overrides.engine.dtype=int8"])
    with pytest.raises(ConfigError, match=r"optim.betas controls it\); engine.dtype = 'int8' \(model.dtype"):
        sft_sections(config, get_platform("cpu"))


def test_what_nothing_of_ours_decides_may_be_set():
    raw = {
        "trainer.balance_batch": "false",
        "trainer.logger": '["console"]',
        ROLLOUT + "agent.agent_loop_config_path": "mine.yaml",  # perf/bench.py's
        ROLLOUT + "max_num_batched_tokens": "22528",  # the shipped configurations'
        ACTOR + "entropy_from_logits_with_chunking": "true",
        ACTOR + "use_torch_compile": "false",
        ACTOR + "entropy_coeff": "0.1",
        ACTOR + "megatron.override_transformer_config.attention_backend": "auto",
    }
    config = load_config(RlConfig, RL, [f"verl_overrides.{key}={value}" for key, value in raw.items()])
    tree = ppo_tree(config, get_platform("cpu"))
    assert tree.actor_rollout_ref.rollout.agent.agent_loop_config_path == "mine.yaml"
    assert tree.actor_rollout_ref.actor.entropy_coeff == 0.1


# Of every setting that reaches verl another value than the configuration's. What our own parts read
# from the run's file (rollout.max_dropped_fraction, reward.answer ...) moves no key.
SETTINGS = """
run.name=x run.seed=5 cluster.gpus_per_node=2 cluster.nodes=2 model.path=x model.dtype=bfloat16
model.fp8=tensorwise parallel.ep=2,cluster.gpus_per_node=2 parallel.etp=1,parallel.tp=2,cluster.gpus_per_node=2
parallel.tp=2,cluster.gpus_per_node=2
parallel.pp=2,parallel.vpp=2,cluster.gpus_per_node=2 parallel.cp=2,cluster.gpus_per_node=2
memory.recompute=full memory.recompute=1 memory.fused_cross_entropy=true
memory.adam_states=bfloat16 memory.optimizer_on_cpu=0.5 memory.offload_idle=true
optim.lr=1 optim.min_lr=1e-9 optim.schedule=cosine optim.warmup_fraction=0.5 optim.weight_decay=1
optim.betas=[0.5,0.999] optim.betas=[0.9,0.5] optim.clip_grad=2 data.train_file=x data.max_prompt_tokens=9
train.steps=7 train.prompts_per_step=24 train.mini_batch_prompts=6 train.micro_batch_tokens=9999
train.mode=partial_rollout train.mode=partial_rollout,train.prefetch_batches=2 train.max_staleness={drop=3}
train.mode=async,rollout.gpus=1,cluster.gpus_per_node=2 train.max_staleness={wait=7}
rollout.group_size=4 rollout.max_turns=2 rollout.max_response_tokens=99 rollout.temperature=0.5
rollout.engine_tp=2,cluster.gpus_per_node=2 rollout.engine_memory_fraction=0.5 rollout.max_running_requests=3
rollout.agent_workers=2
rollout.engine_args={chunked_prefill_size=99} validation.every=3 validation.n=3 validation.temperature=0.5
validation.top_p=0.5 validation.files=["x"] reward.workers=2
algorithm.name=grpo critic.lr=1 algorithm.clip=[0.1,0.28] algorithm.clip=[0.2,0.5]
algorithm.clip=[0.2,0.28,5] algorithm.loss_agg=seq-mean-token-sum algorithm.normalize_by_std=false
algorithm.filter_groups=10 algorithm.importance_sampling=token algorithm.importance_bounds=[0,3]
algorithm.kl_coef=0.1 algorithm.old_log_prob=rollout algorithm.loss=gspo algorithm.kl_type=k2 algorithm.kl_in=reward
algorithm.loss=sapo,algorithm.loss_agg=seq-mean-token-mean,algorithm.tau=[2,3] algorithm.gamma=0.9
algorithm.loss_agg=seq-mean-token-sum-norm algorithm.lam=0.9 critic.warmup_steps=2
algorithm.importance_sampling=token,algorithm.importance_bounds=[0.5,2]
algorithm.rejection=seq_max_k2,algorithm.rejection_bounds=[0,1]
algorithm.rejection=seq_mean_k1,algorithm.rejection_bounds=[0.5,2]
algorithm.old_log_prob=rollout,algorithm.rejection=seq_max_k2,algorithm.rejection_bounds=[0,1]
algorithm.router_replay=R2 algorithm.router_replay=R3
experts.load_balancing={aux_loss=0.1}
checkpoint.every_steps=3 checkpoint.reshardable=true checkpoint.asynchronous=true
"""
FREE = {
    ROLLOUT + "agent.agent_loop_config_path",  # perf/bench.py takes another loop on purpose
    # Of one node alone verl starts Ray, of several the launch scripts do; how is nobody's setting.
    *(f"ray_kwargs.ray_init.{key}" for key in ("num_cpus", "include_dashboard", "object_store_memory")),
    "ray_kwargs.ray_init.runtime_env.env_vars",
}


def as_settings(words: str) -> list[str]:
    """ "a.b=1,c.d=[2,3]" as two settings."""
    return re.split(r",(?=[a-z])", words)


@pytest.mark.parametrize("words", SETTINGS.split())
def test_every_key_that_a_setting_moves_is_refused_raw(words: str):
    platform = get_platform("cpu")
    # With what reads most of the settings switched on, where these words leave it alone.
    base = ["algorithm.name=ppo", "algorithm.kl_coef=0.2", "train.prompts_per_step=12", "train.mini_batch_prompts=12"]
    before: dict[str, Any] = ppo_keys(load_config(RlConfig, RL, base), platform)
    after: dict[str, Any] = ppo_keys(load_config(RlConfig, RL, [*base, *as_settings(words)]), platform)
    moved = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    if words == "algorithm.name=grpo":  # no critic, so none of its keys
        moved &= after.keys()
    assert moved, "the setting reaches nothing"
    decided = RL_KEYS | (ENGINE_LOG_PROB_KEYS if "old_log_prob" in words else {})
    assert not {key for key in moved - FREE if decided_by(key, decided) is None}


def test_sft_keys_that_settings_move_are_refused_raw():
    platform = get_platform("cpu")

    def keys(*settings: str) -> dict[str, Any]:
        sections = sft_sections(load_config(SftConfig, SFT, settings), platform)
        return {f"{section}.{key}": value for section, table in sections.items() for key, value in table.items()}

    moved = set()
    for setting in ("train.steps=7", "optim.lr=1", "optim.betas=[0.5,0.999]", "optim.clip_grad=2",
                    "optim.schedule=linear", "memory.adam_states=bfloat16", "memory.optimizer_on_cpu=0.5",
                    "parallel.tp=2", "train.micro_batch_tokens=9999", "model.path=x", "run.seed=5"):  # fmt: skip
        moved |= {key for key, value in keys(setting).items() if value != keys().get(key)}
    assert "optim.override_optimizer_config" in moved
    assert not {key for key in moved if decided_by(key, SFT_KEYS) is None}
