"""What settings do in verl and its engines: the keys and arguments that we resolve for them.

Losses and advantages are in test_losses.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from retool_mcore.config import EvaluationConfig, RlConfig, load_config, load_evaluation
from retool_mcore.platforms import get_platform
from retool_mcore.train.dry_run import differences
from retool_mcore.verl.keys.rollout import engine_args, write_settings
from retool_mcore.verl.keys.tree import check_ppo_tree, ppo_keys
from tests.unit.verl.loss_scenario import RL, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
H200 = RL.parent / "rl_qwen2.5_7b_h200x8.toml"
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


def test_groups_are_filtered_by_answers_and_not_by_shaped_rewards(tmp_path: Path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    words = ["algorithm.filter_groups=10", "reward.call_bonus=[0.1, -0.6]", f"run.root={tmp_path}"]
    config = load_config(RlConfig, RL, words)
    config.run.dir.mkdir(parents=True)
    write_settings(config)
    trainer: Any = SimpleNamespace(config=tree(*words), trainer_mode="sync", _add_prompts_to_generate=int)
    sampler: Any = PPOTrainer._build_replay_buffer(trainer)
    assert sampler.filter_groups_metric == "acc"
    assert sampler.gen_batch_size == 1, "verl replaces exactly the prompts that it has evicted"


def test_a_cache_in_fp8_is_an_argument_of_a_training_runs_server():
    """An evaluation keeps its own argument."""
    cuda, name = get_platform("cuda"), "kv_cache_dtype"
    run = load_config(RlConfig, H200, ["rollout.kv_cache=fp8", "algorithm.importance_sampling=token"])
    evaluation = EvaluationConfig.of(run)
    assert (engine_args(run, cuda)[name], engine_args(evaluation, cuda).get(name)) == ("fp8_e4m3", None)
    evaluation.rollout.engine_args[name] = "fp8_e5m2"
    assert engine_args(evaluation, cuda)[name] == "fp8_e5m2"
    assert name not in engine_args(load_config(RlConfig, H200), cuda)


@pytest.mark.parametrize(
    ("words", "largest"),
    [
        ((), 512),
        (("rollout.max_running_requests=300",), 300),
        (("rollout.engine_args={cuda_graph_max_bs_decode=64}",), 64),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_decoding_of_all_requests_that_run_at_once_is_captured(words: tuple[str, ...], largest: int | None):
    """SGLang by itself captures 256. An evaluation gets the same, the CPU's engine nothing."""
    name = "cuda_graph_max_bs_decode"
    config = load_config(RlConfig, RL.parent / "rl_gsm8k_gpu1.toml", list(words))
    evaluation = load_evaluation(RL.parent / "rl_gsm8k_gpu1.toml", list(words))
    assert engine_args(config, get_platform("cuda")).get(name) == largest
    assert engine_args(evaluation, get_platform("cuda")).get(name) == largest
    assert ("engine_args" in " ".join(words)) == (name in engine_args(config, get_platform("cpu")))
    assert get_platform("cuda").rollout.engine.graphs(300, 4) == {}, "from TP 4 on SGLang captures 512 by itself"
