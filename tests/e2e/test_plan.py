"""`retool plan` as a command: hardware, JSON, the table for Ascend, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.planner.hardware import hardware_of_run, parse
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import refusal
from tests.unit.planner.plans import CONFIGS, ROOT, SEVEN, THIRTY_TWO, rl
from tests.unit.planner.test_data_lengths import folder  # noqa: F401  a fixture


def command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "retool_mcore", "plan", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("device", "name"), [("NVIDIA H200", "h200x1"), ("NVIDIA H100 80GB HBM3", "h100x1"), ("Tesla T4", "")]
)
def test_without_a_name_the_plan_is_for_this_machines_gpu(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{device}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = load_config(RlConfig, CONFIGS / "rl_gsm8k_gpu1.toml")
    if name:
        assert hardware_of_run(run).name == name
        assert hardware_of_run(rl("rl_qwen2.5_7b_lora_h100x1")).name == name, "not the GPU that its file names"
        assert hardware_of_run(rl("rl_qwen2.5_32b_h100x16")).name == "h100x16", "of two nodes: not of this machine"
    else:
        with pytest.raises(ConfigError, match=r"neither the file's name nor run\.name contains the GPU to plan for"):
            hardware_of_run(run)


def test_what_cannot_fit_is_refused_and_by_how_much():
    done = command("configs/sft_qwen2.5_32b_h200x8.toml", "parallel.tp=1")
    assert done.returncode == 2
    assert "training does not fit: it needs" in done.stderr and "the largest part is gradients" in done.stderr
    assert "the fastest settings of each layout that fits" in done.stdout
    one = rl("rl_qwen2.5_32b_h200x8", "rollout.engine_tp=1", "rollout.engine_memory_fraction=0.4")
    plan = make_plan(one, THIRTY_TWO, parse("h200x8"))
    assert "Raise rollout.engine_tp" in refusal(plan, parse("h200x8"))
    both = rl("rl_qwen2.5_32b_h200x8", "memory.offload_idle=false", "rollout.engine_memory_fraction=0.9")
    assert "set memory.offload_idle" in refusal(make_plan(both, THIRTY_TWO, parse("h200x8")), parse("h200x8"))


def test_json_has_the_same_numbers():
    done = command("configs/rl_qwen2.5_7b_h200x8.toml", "--json", "--hardware", "h200x8")
    tree = json.loads(done.stdout)
    assert tree["hardware"] == "h200x8" and tree["fits"] is True and tree["proposals"]
    assert tree["step_s"] == pytest.approx(sum(tree["phases_s"].values()))
    assert tree["train_gib"]["total"] == pytest.approx(sum(v for k, v in tree["train_gib"].items() if k != "total"))
    assert {"calls_per_s", "cores_per_node", "workers_per_node"} == set(tree["sandbox"])


def test_in_mode_async_engines_and_trainer_have_separate_devices():
    """On 8 devices: four train, four sample."""
    words = ("train.mode=async", "rollout.gpus=4", "train.mini_batch_prompts=256", "parallel.tp=2")
    run = rl("rl_qwen2.5_7b_h200x8", *words)
    plan, sync = make_plan(run, SEVEN, parse("h200x8")), make_plan(rl("rl_qwen2.5_7b_h200x8"), SEVEN, parse("h200x8"))
    assert (plan.dp, plan.training_gib) == (2, plan.train.total) and sync.training_gib > sync.train.total
    assert plan.rollout and plan.rollout.training == 0.0
    assert plan.rollout.kv_cache == pytest.approx(run.rollout.engine_memory_fraction * 139.8 - plan.rollout.weights)
    assert "in each of 4 engines" in plan.notes[1] and "the trainer waits" in plan.notes[2]
    assert plan.phases["old_log_prob"] > 1.9 * sync.phases["old_log_prob"]
