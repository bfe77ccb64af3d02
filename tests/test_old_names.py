"""Settings of earlier versions: refused in a run file, read in what runs recorded themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, SftConfig, load_config, load_run
from retool_mcore.config.base import leaves
from retool_mcore.config.old_names import MOVED, under_todays_names
from retool_mcore.config.reference import reference
from retool_mcore.errors import ConfigError
from retool_mcore.run import checkpoint, saving
from tests.report.generated import QUICKSTART
from tests.run.test_checkpoint_files import RL_7B, save

ROOT = Path(__file__).parents[1]
RL, SFT = ROOT / "configs" / "rl_tiny_cpu.toml", ROOT / "configs" / "sft_tiny_cpu.toml"
KNOWN = {entry.key for entry in reference() if entry.kind}


OLD = [
    (kind, path, old)
    for kind, path in ((SftConfig, SFT), (RlConfig, RL))
    for old in sorted(MOVED)
    if old.partition(".")[0] in kind.model_fields
]


@pytest.mark.parametrize(("kind", "path", "old"), OLD)
def test_an_old_name_in_a_run_file_is_an_error_that_says_what_to_write(
    kind: type[SftConfig | RlConfig], path: Path, old: str
):
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path, [f"{old}=1"])
    assert f"{old} is now {MOVED[old]}" in str(caught.value) and old not in KNOWN


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        ({"data.val_file": "a.parquet"}, {"validation.files": ["a.parquet"]}),
        ({"optim.beta1": 0.8, "optim.beta2": 0.95}, {"optim.betas": [0.8, 0.95]}),
        ({"optim.beta2": 0.95}, {"optim.betas": [0.9, 0.95]}),
        ({"optim.betas": [0.5, 0.6]}, {"optim.betas": [0.5, 0.6]}),
        ({"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}, {"algorithm.clip": [0.1, 0.3]}),
        ({"algorithm.tau_neg": 2.0}, {"algorithm.tau": [1.0, 2.0]}),
        ({"algorithm.importance_threshold": 3.0}, {"algorithm.importance_bounds": [0.0, 3.0]}),
        ({"algorithm.rejection_high": 0.1}, {"algorithm.rejection_bounds": [0.0, 0.1]}),
        ({"algorithm.mask_truncated": False, "algorithm.mask_void_turns": True}, {"algorithm.mask": ["void_turns"]}),
        ({"algorithm.mask_truncated": True, "algorithm.mask_void_turns": False}, {"algorithm.mask": ["truncated"]}),
        ({"memory.recompute": "full", "memory.recompute_layers": 4}, {"memory.recompute": 4}),
        ({"memory.recompute": "full", "memory.recompute_layers": 0}, {"memory.recompute": "full"}),
        ({"memory.recompute": "auto"}, {"memory.recompute": "auto"}),
        (
            {"experts.load_balancing": "aux_loss", "experts.aux_loss_coef": 0.1},
            {"experts.load_balancing.aux_loss": 0.1},
        ),
        ({"experts.load_balancing": "none", "experts.aux_loss_coef": 0.0}, {}),
        ({"experts.router_dtype": "float32", "parallel.sequence_parallel": True}, {}),
        ({"experts.router_dtype": "model"}, {"experts.router_dtype": "model"}),
        ({"reward.correct": 2.0, "reward.wrong": -3.0}, {"reward.answer": [2.0, -3.0]}),
        ({"reward.call_bonus": 0.1, "reward.call_bonus_cap": -0.5}, {"reward.call_bonus": [0.1, -0.5]}),
        ({"reward.require_format": True}, {"reward.require": ["format"]}),
        ({"reward.require_format": False, "reward.require_simplified": True}, {"reward.require": ["simplified"]}),
        ({"rollout.tool": False, "rollout.tools": ["code_interpreter"]}, {"rollout.tools": []}),
        ({"rollout.tool": True, "rollout.tools": ["my.tools:Search"]}, {"rollout.tools": ["my.tools:Search"]}),
        ({"rollout.tool": True}, {"rollout.tools": ["code_interpreter"]}),
        (
            {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3, "algorithm.clip_c": 3.0},
            {"algorithm.clip": [0.1, 0.3, 3.0]},
        ),
        ({"algorithm.filter_groups": True, "rollout.max_refill_batches": 4}, {"algorithm.filter_groups": 4}),
        ({"algorithm.filter_groups": False, "rollout.max_refill_batches": 4}, {"algorithm.filter_groups": 0}),
        ({"train.max_staleness": 3, "train.when_stale": "wait"}, {"train.max_staleness.wait": 3}),
        ({"data.curriculum": "solve_rate", "data.curriculum_floor": 0.25}, {"data.curriculum": 0.25}),
        ({"data.curriculum": "off", "data.curriculum_floor": 0.25}, {"data.curriculum": 1.0}),
        ({"best.metric": "val_loss", "best.mode": "max"}, {"best.metric": "max val_loss"}),
        ({"best.metric": "val_loss", "best.mode": "auto"}, {"best.metric": "val_loss"}),
        ({"best.metric": "", "best.mode": "auto"}, {"best.metric": ""}),
        ({"best.patience": 3, "best.min_delta": 0.5}, {"best.patience": [3, 0.5]}),
        ({"rollout.max_malformed_calls": 3, "rollout.max_tool_s": 300.0, "critic.clip_value": 0.5}, {}),
        ({"rollout.max_malformed_calls": 5}, {"rollout.max_malformed_calls": 5}),
        ({"model.bridge": "mbridge"}, {}),
        ({"model.bridge": "megatron"}, {"model.bridge": "megatron"}),
        ({"optim.lr": 1.0, "of.later": 2}, {"optim.lr": 1.0, "of.later": 2}),
    ],
)
def test_what_a_run_recorded_is_read_under_todays_names(recorded: dict[str, Any], today: dict[str, Any]):
    tree: dict[str, Any] = {}
    for name, value in recorded.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    before = json.dumps(tree)
    assert leaves(under_todays_names(tree)) == today
    assert json.dumps(tree) == before, "the record itself stays"


@pytest.mark.parametrize("name", ["sft", "text_rl", "tool_rl"])
def test_a_run_of_november_goes_on_from_its_own_file(name: str, tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_bytes((QUICKSTART / name / "config.toml").read_bytes())
    config = load_run(file)
    assert config.optim.betas == [0.9, 0.999] and not leaves(config.model_dump()).keys() & MOVED.keys()
    for state in (QUICKSTART / name / "checkpoints").glob("*/state.json"):
        before, now = checkpoint.read_state(state.parent).identity, checkpoint.identity(config)
        assert before["optim"] == now["optim"]
    other = tmp_path / "mine.toml"
    other.write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"optim\.beta1 is now optim\.betas = \[beta1, beta2\]"):
        load_run(other)


def test_a_checkpoint_with_old_names_is_of_the_same_run_and_of_another_where_a_value_differs(tmp_path: Path):
    config = load_config(RlConfig, RL_7B, [f"run.root={tmp_path}"])
    save(config, 50)
    path = saving.step_folder(config, 50) / "state.json"
    state = json.loads(path.read_text())
    for part in (state["identity"], state["settings"]):
        part["optim"]["beta1"], part["optim"]["beta2"] = part["optim"].pop("betas")
    path.write_text(json.dumps(state))
    assert checkpoint.find_resume(config) is not None
    with pytest.raises(checkpoint.CheckpointError, match=r"optim\.betas was \[0\.9, 0\.999\], now \[0\.9, 0\.95\]"):
        checkpoint.find_resume(load_config(RlConfig, RL_7B, [f"run.root={tmp_path}", "optim.betas=[0.9, 0.95]"]))
