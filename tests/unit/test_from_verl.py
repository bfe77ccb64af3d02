"""`retool config from-verl`: verl's run files as ours, key by key."""

import copy
import functools
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

RECIPE = Path(__file__).with_name("verl_retool_32b.txt").read_text(encoding="utf-8").partition("\n")[2]
TABLES = tomllib.loads(Path(__file__).with_name("verl_values.toml").read_text(encoding="utf-8"))
STEPS = "trainer.total_training_steps=33"


@functools.cache
def verls_tree() -> Any:
    from retool_mcore.verl.keys.tree import ppo_defaults

    return ppo_defaults()


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's defaults take seconds to compose, and each conversion changes its own copy."""
    monkeypatch.setattr("retool_mcore.cli.from_verl.ppo_defaults", lambda: copy.deepcopy(verls_tree()))


def converted(tmp_path: Path, text: str, *extra: str, name: str = "verl.txt") -> tuple[dict[str, Any], str, str]:
    """The run file as a tree, its text, and what was said of it."""
    file, out = tmp_path / name, tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(all_commands(), ["config", "from-verl", str(file), "--out", str(out), *extra])
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    return tomllib.loads(text), text, " ".join(result.output.split())


def test_verls_own_retool_recipe_becomes_a_run_file_that_loads(tmp_path: Path):
    _, text, _ = converted(tmp_path, RECIPE, STEPS)
    run = load_config(RlConfig, tmp_path / "run.toml")
    assert (run.run.name, run.cluster.nodes, run.cluster.gpus_per_node) == ("qwen2.5-32b_dapo", 2, 8)
    assert (run.train.prompts_per_step, run.train.mini_batch_prompts, run.train.steps) == (512, 64, 33)
    assert (run.rollout.group_size, run.rollout.max_turns, run.rollout.engine_tp) == (16, 8, 4)
    assert (run.data.max_prompt_tokens, run.rollout.max_response_tokens) == (2048, 16384)
    assert (run.validation.n, run.validation.top_p, run.validation.temperature) == (30, 0.6, 1.0)
    assert (run.parallel.cp, run.memory.offload_idle, run.train.micro_batch_tokens) == (8, True, 18432)
    assert (run.algorithm.clip, run.algorithm.kl_coef) == ([0.2, 0.28, 10.0], 0.0)
    assert (run.validation.every, run.checkpoint.every_steps, run.optim.lr) == (5, 30, 1e-6)
    assert run.rollout.tool
    assert text.partition("# To do:\n")[2].splitlines()[0].startswith("# choose parallel.tp: `retool plan`")


def test_every_key_of_the_recipe_is_a_setting_or_is_named_with_a_reason(tmp_path: Path):
    _, text, _ = converted(tmp_path, RECIPE, STEPS)
    alike = {  # this trainer sets them so, too
        *("data.return_raw_chat", "data.truncation", "actor_rollout_ref.actor.kl_loss_coef"),
        *("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.rollout.mode"),
        "actor_rollout_ref.rollout.multi_turn.enable",
    }
    keys = {line.partition("=")[0] for line in RECIPE.split()} - {"dapo"}
    assert {key for key in keys if key not in text} == alike
    reasons = dict(line[2:].split(": ", 1) for line in text.partition("# To do:\n")[2].splitlines() if ": " in line)
    assert "rollout.max_turns" in reasons["actor_rollout_ref.rollout.multi_turn.max_user_turns = 8"]
    assert "train.steps" in reasons["trainer.total_epochs = 1"]
    assert "write score(response)" in reasons["custom_reward_function.name = compute_score"]
    assert all(reasons.values())


def test_defaults_of_verl_that_change_what_is_learnt_are_written_out(tmp_path: Path):
    """Ours are others: clip [0.2, 0.28, 10], validation as the rollout samples."""
    text = "data: {train_batch_size: 64}\nalgorithm: {adv_estimator: grpo}\ntrainer: {total_training_steps: 10}\n"
    tree, _, _ = converted(tmp_path, text, name="verl.yaml")
    assert tree["algorithm"]["clip"] == [0.2, 0.2, 3.0]
    assert (tree["validation"]["n"], tree["validation"]["temperature"]) == (1, 0.0)
    assert tree["rollout"]["tools"] == [], "verl's default has no tool"
    assert tree["rollout"]["max_response_tokens"] == 512
    assert tree["train"]["micro_batch_tokens"] == 512 + 512, "without dynamic batches verl takes rows of full length"


@pytest.mark.parametrize("row", TABLES["case"], ids=lambda row: row[0])
def test_a_value_is_read_back_as_our_setting_counts_it(tmp_path: Path, row: list[Any]):
    verl = [each for each in row if isinstance(each, str)]
    steps = "trainer.total_training_steps=30" if "warmup_steps=6" in verl[0] else STEPS
    tree, _, _ = converted(tmp_path, "# of mine\nalgorithm.adv_estimator=grpo\n", steps, *verl)
    for settings in row[len(verl) :]:
        for section, values in settings.items():
            assert {name: tree[section].get(name, "") for name in values} == values, section


def test_epochs_are_steps_where_the_data_is_here_and_a_formula_elsewhere(tmp_path: Path):
    _, text, output = converted(tmp_path, RECIPE)
    formula = "trainer.total_epochs (1) * rows of data.train_files / data.train_batch_size (512)"
    assert f"# set train.steps to {formula}" in text and f"to do: set train.steps to {formula}" in output
    pq.write_table(pa.table({"prompt": ["x"] * 1500}), tmp_path / "train.parquet")
    files = f"data.train_files=[{tmp_path}/train.parquet]"
    tree, text, _ = converted(tmp_path, RECIPE, files, "trainer.total_epochs=3")
    assert tree["train"]["steps"] == 6 and ", 1500 rows" in text


SCRIPT = """#!/usr/bin/env bash
set -x
export VLLM_USE_V1=1  # it's a comment
CONFIG_PATH="$(pwd)/config"
export n=${N_RESP:-8}
train_files="['data/a.parquet']"
DATA=(
  data.train_files="$train_files"
  data.max_response_length=$((1024 * (n - 4) / 2))
)
ulimit -n 65535
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" \\
    --config-name='mine' \\
    "${DATA[@]}" \\
    actor_rollout_ref.rollout.n=$n \\
    trainer.experiment_name="run_$NAME" \\
    trainer.logger='["console","wandb"]' $@ 2>&1 | tee log.txt
"""


def test_a_run_script_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 64, max_response_length: 1}\n", encoding="utf-8"
    )
    tree, text, _ = converted(tmp_path, SCRIPT, STEPS, "trainer.experiment_name=mine", name="run.sh")
    assert (tree["rollout"]["group_size"], tree["rollout"]["max_response_tokens"]) == (8, 2048)
    assert (tree["data"]["train_file"], tree["train"]["prompts_per_step"]) == ("data/a.parquet", 64)
    assert "group_size = 8  # actor_rollout_ref.rollout.n\n" in text
    assert "max_response_tokens = 2048  # data.max_response_length\n" in text


def test_losses_are_sorted_and_a_layout_of_megatron_is_kept(tmp_path: Path):
    megatron = f"{STEPS}\nactor_rollout_ref.actor.megatron.tensor_model_parallel_size=2\ntrainer.nnodes=1\n"
    more = "algorithm.use_pf_ppo=true\ntrainer.logger=[console]\nhydra.x=1\n"
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml\n"
    tree, text, _ = converted(tmp_path, megatron + more + tools)
    assert tree["parallel"]["tp"] == 2 and "choose parallel.tp" not in text
    assert tree["rollout"]["tools"] == ["code_interpreter"], "never none"
    starts = ("# Lost", "# Replaced", "# Without", "# algorithm.use_pf")
    found = [line for line in text.splitlines() if line.startswith(starts)]
    assert found == ["# Lost:", found[1], "# Replaced:", "# Without effect:"] and "use_pf_ppo" in found[1]
    assert "# actor_rollout_ref.rollout.multi_turn.tool_config_path" in text


@pytest.mark.parametrize(("name", "text", "message"), TABLES["unreadable"])
def test_a_file_that_cannot_be_read_costs_one_line(tmp_path: Path, name: str, text: str, message: str):
    from retool_mcore.cli.from_verl import convert

    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        convert(file)
    assert "\n" not in str(error.value)
