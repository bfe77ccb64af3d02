"""Settings of [algorithm] and [critic] that do not fit together, each refused by one error."""

from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError

RL = Path(__file__).parents[2] / "configs" / "rl_tiny_cpu.toml"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("loss=gspo clip=[0.2,0.28,3]", 'algorithm.clip = [0.2, 0.28, 3.0] has no effect with algorithm.loss = "gspo"'),
        ("tau=[2,1.05]", 'algorithm.tau = [2.0, 1.05] has no effect with algorithm.loss = "ppo"'),
        ("gamma=0.9", 'algorithm.gamma = 0.9 has no effect with algorithm.name = "grpo"'),
        ("name=reinforce_plus_plus lam=0.9", "algorithm.lam = 0.9 has no effect with"),
        (
            "importance_bounds=[0.5,2]",
            'algorithm.importance_bounds = [0.5, 2.0] has no effect with algorithm.importance_sampling = "off"',
        ),
        ("importance_bounds=[0,3]", "algorithm.importance_bounds = [0.0, 3.0] has no effect with"),
        ("rejection_bounds=[0,2]", 'has no effect with algorithm.rejection = "off"'),
        ("kl_type=k1", "algorithm.kl_type = k1 has no effect with algorithm.kl_coef = 0"),
        ("kl_coef=1 kl_in=reward kl_type=k3+", 'Use "k3"'),
        ("loss=sapo", 'Set loss_agg = "seq-mean-token-mean"'),
        ("rejection=seq_mean_k1", "Set the first bound above 0 and at most 1, the second to at least 1"),
        ("rejection=token_k2", "rejection_bounds = [0.0, 0.0]. Set the first bound to 0 and the second above 0"),
        ("name=ppo rejection=token_k2 rejection_bounds=[0,1]", "would lose the reward of a rejected token"),
        (
            "rejection=token_k2 rejection_bounds=[0,1] loss_agg=seq-mean-token-mean",
            "would divide by only the kept tokens of a response",
        ),
        (
            "rejection=token_k3 rejection_bounds=[0,1] loss=gspo",
            "would compute a response's ratio from only its kept tokens",
        ),
        (
            "loss=gspo old_log_prob=rollout importance_sampling=token",
            'uses a separate loss of verl, so it cannot use algorithm.loss = "gspo"',
        ),
        ('mask=["truncated"] old_log_prob=rollout importance_sampling=token', "fails on a micro-batch"),
        ("clip=[0.2,0.28,1]", "algorithm.clip = [0.2, 0.28, 1.0] is out of range. Give two numbers above 0, opt"),
        ("clip=[0.2]", "algorithm.clip = [0.2]: expected 2 or more"),
        ("importance_sampling=token importance_bounds=[1.5,2]", "Give a number from 0 to 1 and a number of at least 1"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_error(settings: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(RlConfig, RL, [f"algorithm.{setting}" for setting in settings.split()])
    assert message in str(caught.value)
    assert str(RL) in str(caught.value) or str(caught.value).endswith("(command line).")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce_plus_plus_baseline"])
def test_what_compares_a_group_needs_one(name: str):
    with pytest.raises(ConfigError, match=f'algorithm.name = "{name}" compares the responses to a prompt'):
        load_config(RlConfig, RL, [f"algorithm.name={name}", "rollout.group_size=1"])
    alone = load_config(RlConfig, RL, ["algorithm.name=reinforce_plus_plus", "rollout.group_size=1"])
    assert not alone.algorithm.compares_within_groups


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("critic.warmup_steps=2",), 'critic.warmup_steps = 2 has no effect with algorithm.name = "grpo"'),
        (("algorithm.name=ppo", "train.steps=2", "critic.warmup_steps=2"), "leaves no step of train.steps = 2"),
    ],
)
def test_a_warm_up_without_a_critic_or_without_an_end_is_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(RlConfig, RL, settings)
    assert message in str(caught.value)
