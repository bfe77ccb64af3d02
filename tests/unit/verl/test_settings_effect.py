"""What an RL run's settings do to optimizers, filters, rewards and the router.

verl's own functions, on the objects that verl makes of our resolved tree. Losses and advantages are
in test_losses.py.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms import get_platform
from retool_mcore.verl.keys import tree as keys
from retool_mcore.verl.keys.rollout import write_settings

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"
HERE: list[str] = []  # the settings that name what the fixture has made


@pytest.fixture(autouse=True, scope="module")
def model_on_disk(verl_on_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What verl's configuration of a critic reads; verl's defaults are composed once."""
    folder = tmp_path_factory.mktemp("settings")
    write_model(folder / "model", build_tokenizer(tokenizer_rows()), seed=0)
    HERE[:] = [f"model.path={folder}/model"]
    defaults = keys.ppo_defaults()
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(keys, "ppo_defaults", lambda: copy.deepcopy(defaults))
        yield


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        (("checkpoint.every_steps=3",), 3),
        (("checkpoint.every_steps=0", "train.steps=7"), 7),
        (("checkpoint.every_steps=0", "checkpoint.export=false"), -1),
    ],
)
def test_a_run_that_exports_saves_its_last_step_at_least(settings: tuple[str, ...], every: int):
    assert tree(*settings).trainer.save_freq == every


def tree(*settings: str) -> Any:
    """verl's resolved tree of the tiny run with ``settings``, as verl's trainer gets it."""
    from omegaconf import OmegaConf

    made = keys.ppo_tree(load_config(RlConfig, RL, [*HERE, *settings]), get_platform("cpu"))
    return OmegaConf.create(OmegaConf.to_container(made, resolve=True))


def tree_of_run(*settings: str) -> Any:
    """``tree``, with the settings in the run's folder, where our parts read them."""
    config = load_config(RlConfig, RL, [*HERE, *settings])
    config.run.dir.mkdir(parents=True)
    write_settings(config)
    return tree(*settings)


def made_by_verl(part: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(copy.deepcopy(part))


OPTIM = ("optim.lr=3e-4", "optim.min_lr=1e-5", "optim.weight_decay=0.07", "optim.clip_grad=0.4")


@pytest.mark.parametrize(
    ("role", "lr", "min_lr", "settings"),
    [
        ("actor_rollout_ref.actor", 3e-4, 1e-5, ()),
        ("critic", 2e-3, 1e-5, ("algorithm.name=ppo", "critic.lr=2e-3")),
        ("critic", 4e-6, 4e-6, ("algorithm.name=ppo", "critic.lr=4e-6")),  # below min_lr: constant
    ],
)
def test_megatrons_optimizer_is_made_with_the_run_files_values(
    role: str, lr: float, min_lr: float, settings: tuple[str, ...]
):
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    part = made_by_verl(OmegaConf.select(tree(*OPTIM, *settings), role))
    optim = init_megatron_optim_config(part.optim, fp16=False, bf16=False)
    assert (optim.optimizer, optim.lr, optim.min_lr) == ("adam", lr, min_lr)
    assert (optim.weight_decay, optim.clip_grad) == (0.07, 0.4)


def test_log_probabilities_are_taken_at_the_temperature_that_was_sampled_at():
    """Of the update as of the pass before it: verl hands both to the workers with the batch."""
    from verl.trainer.ppo.v1 import trainer_base

    class Asked(Exception):
        """The workers would begin here."""

    def stop(batch: Any) -> Any:
        raise Asked

    workers = SimpleNamespace(compute_log_prob=stop, update_actor=stop)
    trainer = SimpleNamespace(config=tree("rollout.temperature=0.6"), actor_rollout_wg=workers)
    for method in ("_compute_old_log_prob", "_update_actor"):
        meta = SimpleNamespace(extra_info={}, keys=[], partition_id="train")
        with pytest.raises(Asked):
            getattr(trainer_base.PPOTrainer, method)(trainer, meta, {})
        assert meta.extra_info["temperature"] == 0.6


def test_groups_are_filtered_by_the_answers_and_not_by_the_shaped_reward(tmp_path: Path, monkeypatch):
    """Both kinds of group through verl's own filter, in the sampler that verl's trainer builds of
    our tree.
    """
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    settings = ("algorithm.filter_groups=10", "rollout.group_size=2", "reward.call_bonus=[0.1, -0.6]")
    trainer = SimpleNamespace(
        config=tree_of_run(*settings, f"run.root={tmp_path}"),
        trainer_mode="sync",
        _add_prompts_to_generate=lambda count: None,
    )
    sampler = trainer_base.PPOTrainer._build_replay_buffer(trainer)
    assert sampler.gen_batch_size == 1, "verl replaces exactly the prompts that it has evicted"
    rows = {
        "allwrong_0_0": (0.0, -1.0),
        "allwrong_1_0": (0.0, -0.9),  # wrong as well, with a call's bonus
        "differ_0_0": (1.0, 0.5),
        "differ_1_0": (0.0, 0.5),  # another answer, and by its shaping the same reward
    }

    def get(keys: list[str], select_fields: list[str], **_: Any) -> dict[str, Any]:
        extras = [{"reward_extra_info": {"acc": rows[key][0], "score": rows[key][1]}} for key in keys]
        whole = {"extra_fields": extras, "rm_scores": [torch.tensor([0.0, rows[key][1]]) for key in keys]}
        return {name: whole[name] for name in select_fields}

    monkeypatch.setattr(replay_buffer, "tq", SimpleNamespace(kv_batch_get=get))
    sampler.partitions["train"] = {key: {} for key in rows}
    sampler.finished_keys["train"] = {"allwrong", "differ"}
    filtered, _ = sampler._dapo_filtered_keys("train")
    assert filtered == {"allwrong"}


def test_the_reward_that_verl_loads_is_the_runs_with_its_shaping(tmp_path: Path):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    settings = ("reward.answer=[2.0, -3.0]", "reward.call_bonus=[0.5, -1.5]")
    longest = ("reward.overlong_buffer_tokens=40", "rollout.max_response_tokens=200")
    made = get_custom_reward_fn(tree_of_run(*settings, *longest, f"run.root={tmp_path}"))
    assert made is not None

    def score(answer: str, calls: int, tokens: int) -> float:
        counts = {"calls": calls, "malformed": 0, "response_tokens": tokens}
        info = {"index": 0, "answer": answer, "behavior": counts}
        return made(data_source="math", solution_str="", ground_truth="34", extra_info=info)["score"]

    assert score("34", 0, 10) == 2.0
    assert score("35", 0, 10) == -3.0
    assert score("35", 2, 10) == -3.0 + 2 * 0.5
    assert score("35", 9, 10) == -1.5  # the cap
    assert score("34", 0, 180) == 2.0 - 0.5  # half of the last 40 of 200 tokens
