"""[optim] and [memory] as Megatron's optimizer configuration has them, for SFT, the actor and the
critic.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys.tree import ppo_tree, sft_worker_config

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
BETAS = ("optim.betas=[0.5, 0.6]",)


def of_megatron(optim: Any) -> Any:
    """verl's own way from its dataclass to Megatron's."""
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    return init_megatron_optim_config(optim, use_distributed_optimizer=True, bf16=False)


def of_rl(*settings: str) -> dict[str, Any]:
    from verl.utils.config import omega_conf_to_dataclass

    tree = ppo_tree(load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", settings), get_platform("cpu"))
    parts = {"actor": tree.actor_rollout_ref.actor.optim, "critic": tree.critic.optim}
    return {name: omega_conf_to_dataclass(part) for name, part in parts.items()}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_betas_reach_megatrons_adam_in_rl(role: str):
    optim = of_megatron(of_rl("algorithm.name=ppo", *BETAS)[role])
    assert (optim.adam_beta1, optim.adam_beta2) == (0.5, 0.6)


def test_betas_reach_megatrons_adam_in_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import verl.workers.config as verl_config

    monkeypatch.setattr(verl_config, "HFModelConfig", dict)  # the one part that reads a model's files
    config = load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", BETAS)
    megatron = of_megatron(sft_worker_config(config, get_platform("cpu")).optimizer_config)
    assert (megatron.adam_beta1, megatron.adam_beta2) == (0.5, 0.6)


@pytest.mark.parametrize("mode", ["sync", "partial_rollout", "async"])
def test_the_schedule_counts_the_updates_of_the_whole_run_in_every_mode(mode: str):
    """The paper's size: 400 steps of 8 updates, 5 % of warm-up: the full rate is reached in step
    20.
    """
    settings = ["train.steps=400", "train.prompts_per_step=512", "train.mini_batch_prompts=64"]
    settings += ["optim.schedule=cosine", "optim.warmup_fraction=0.05", f"train.mode={mode}"]
    settings += ["cluster.gpus_per_node=2", "rollout.gpus=1"] if mode == "async" else []
    optim = of_rl(*settings)["actor"]
    assert (optim.lr_warmup_steps, optim.lr_decay_steps) == (20 * 8, 400 * 8)


def rates(optim: Any, updates: int) -> list[float]:
    """The learning rate that Megatron's schedule puts into the optimizer for each update."""
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = get_megatron_optimizer_param_scheduler(optimizer, optim)
    found: list[float] = []
    for _ in range(updates):
        schedule.step(1)  # before the update: verl/update_worker.py
        found.append(optimizer.param_groups[0]["lr"] / optim.lr)
    return found


def test_the_actors_warm_up_begins_after_the_steps_of_the_critic_alone():
    """Six steps, the first two of the critic alone: the actor rises over half of its own four."""
    settings = ("algorithm.name=ppo", "critic.warmup_steps=2", "train.steps=6", "train.mini_batch_prompts=2")
    parts = of_rl(*settings, "train.prompts_per_step=2", "optim.schedule=constant", "optim.warmup_fraction=0.5")
    assert rates(parts["actor"], 4) == pytest.approx([1 / 2, 1, 1, 1])
    assert rates(parts["critic"], 6) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
