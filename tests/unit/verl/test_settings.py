"""What settings do in verl and Megatron: verl's own functions on the tree that we resolve for them.

Losses and advantages are in test_losses.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.train.dry_run import differences
from retool_mcore.verl.keys.rollout import write_settings
from retool_mcore.verl.keys.tree import check_ppo_tree, ppo_keys, ppo_tree, sft_worker_config
from tests.unit.verl.loss_scenario import RL, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
SFT = RL.parent / "sft_tiny_cpu.toml"
BETAS = ("optim.betas=[0.5, 0.6]",)
CASES = yaml.safe_load(Path(__file__).with_name("keys_of_settings.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["settings"][0])
def test_a_setting_reaches_its_keys_of_verl_and_the_engine_of_every_role(case: dict[str, Any]):
    words = case["settings"]
    found = ppo_keys(load_config(RlConfig, RL, words), get_platform("cpu"))
    wanted = {key: value for key, (_, value) in differences({}, case).items() if key != "settings"}
    assert {key: found.get(key, "not set") for key in wanted} == wanted
    actor, *others = (
        {key.removeprefix(role): found[key] for key in found if key.startswith(f"{role}megatron.")}
        for role in ("actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.")
    )
    second = any(word.startswith(("algorithm.kl_coef", "algorithm.name=ppo")) for word in words)
    assert [engine for engine in others if engine] == [actor] * second
    if "algorithm.name=ppo" not in words:  # verl's check of a critic reads the model's files
        check_ppo_tree(tree(*words))


def test_a_run_resumes_from_the_folder_that_was_chosen():
    config, cpu = load_config(RlConfig, RL), get_platform("cpu")
    first, resumed = (ppo_tree(config, cpu, resume).trainer for resume in (None, Path("a/global_step_2")))
    assert (first.resume_mode, resumed.resume_mode) == ("disable", "resume_path")
    assert resumed.resume_from_path == str(Path("a/global_step_2").absolute())


def test_log_probs_are_computed_at_the_sampling_temperature():
    """verl hands the temperature to the workers with the batch, before the update and in it."""
    from verl.trainer.ppo.v1 import trainer_base

    class WorkerCalled(Exception):
        """Raised in place of the workers' pass."""

    def stop(batch: Any) -> Any:
        raise WorkerCalled

    workers = SimpleNamespace(compute_log_prob=stop, update_actor=stop)
    trainer = SimpleNamespace(config=tree("rollout.temperature=0.6"), actor_rollout_wg=workers)
    for method in ("_compute_old_log_prob", "_update_actor"):
        meta = SimpleNamespace(extra_info={}, keys=[], partition_id="train")
        with pytest.raises(WorkerCalled):
            getattr(trainer_base.PPOTrainer, method)(trainer, meta, {})
        assert meta.extra_info["temperature"] == 0.6


def test_groups_are_filtered_by_answers_and_not_by_shaped_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both kinds of group in the sampler that verl's trainer builds from our tree."""
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    settings = ("algorithm.filter_groups=10", "rollout.group_size=2", "reward.call_bonus=[0.1, -0.6]")
    config = load_config(RlConfig, RL, [*settings, f"run.root={tmp_path}"])
    config.run.dir.mkdir(parents=True)
    write_settings(config)
    trainer = SimpleNamespace(
        config=tree(*settings, f"run.root={tmp_path}"),
        trainer_mode="sync",
        _add_prompts_to_generate=lambda count: None,
    )
    sampler = trainer_base.PPOTrainer._build_replay_buffer(trainer)
    assert sampler.gen_batch_size == 1, "verl replaces exactly the prompts that it has evicted"
    rows = {  # key -> accuracy and shaped reward
        "allwrong_0_0": (0.0, -1.0),
        "allwrong_1_0": (0.0, -0.9),
        "differ_0_0": (1.0, 0.5),
        "differ_1_0": (0.0, 0.5),
    }

    def get(keys: list[str], select_fields: list[str], **_: Any) -> dict[str, Any]:
        extras = [{"reward_extra_info": {"acc": rows[key][0], "score": rows[key][1]}} for key in keys]
        columns = {"extra_fields": extras, "rm_scores": [torch.tensor([0.0, rows[key][1]]) for key in keys]}
        return {name: columns[name] for name in select_fields}

    monkeypatch.setattr(replay_buffer, "tq", SimpleNamespace(kv_batch_get=get))
    sampler.partitions["train"] = {key: {} for key in rows}
    sampler.finished_keys["train"] = {"allwrong", "differ"}
    assert sampler._dapo_filtered_keys("train")[0] == {"allwrong"}


# ------------------------------------------------- optimizer and schedule


def optimizer_configs(*settings: str) -> dict[str, Any]:
    """verl's optimizer configurations of the actor and the critic."""
    from verl.utils.config import omega_conf_to_dataclass

    resolved = tree(*settings)
    parts = {"actor": resolved.actor_rollout_ref.actor.optim, "critic": resolved.critic.optim}
    return {name: omega_conf_to_dataclass(part) for name, part in parts.items()}


def test_betas_reach_megatrons_adam(monkeypatch: pytest.MonkeyPatch):
    import verl.workers.config as verl_config
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    configs = optimizer_configs("algorithm.name=ppo", *BETAS)
    monkeypatch.setattr(verl_config, "HFModelConfig", dict)  # its constructor reads a model's files
    sft = sft_worker_config(load_config(SftConfig, SFT, [*BETAS, "checkpoint.asynchronous=true"]), get_platform("cpu"))
    configs["sft"] = sft.optimizer_config
    assert sft.checkpoint_config.async_save
    for optim in configs.values():
        config = init_megatron_optim_config(optim, use_distributed_optimizer=True, bf16=False)
        assert (config.adam_beta1, config.adam_beta2) == (0.5, 0.6)


def relative_rates(optim: Any, updates: int) -> list[float]:
    """The learning rate of each update by Megatron's schedule, divided by ``optim.lr``."""
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = get_megatron_optimizer_param_scheduler(optimizer, optim)
    rates: list[float] = []
    for _ in range(updates):
        schedule.step(1)  # before the update, as in verl/update_worker.py
        rates.append(optimizer.param_groups[0]["lr"] / optim.lr)
    return rates


def test_the_actors_warm_up_begins_after_the_critics_own_steps():
    """Six steps, the first two of the critic alone: the actor warms up over half of its four."""
    settings = ("algorithm.name=ppo", "critic.warmup_steps=2", "train.steps=6", "train.mini_batch_prompts=2")
    configs = optimizer_configs(
        *settings, "train.prompts_per_step=2", "optim.schedule=constant", "optim.warmup_fraction=0.5"
    )
    assert relative_rates(configs["actor"], 4) == pytest.approx([1 / 2, 1, 1, 1])
    assert relative_rates(configs["critic"], 6) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    slow = ("algorithm.name=ppo", "optim.lr=1e-5", "optim.min_lr=1e-6", "optim.schedule=cosine", "critic.lr=1e-7")
    critic = optimizer_configs(*slow)["critic"]
    assert (critic.lr, critic.min_lr) == (1e-7, 1e-7), "its rate does not rise to the actor's last one"
