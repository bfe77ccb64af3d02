"""verl's own run of a case: the settings that verl takes, the work that its tool agent does, and
the steps read from its log.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenario import run_scenario

ROOT = Path(__file__).parents[3]
RESULT = "[2, 3] 156187506250000"  # what the planned call prints
NOT_IN_THE_TREE = (  # dictionaries that verl hands on, and a name that it demands
    "actor_rollout_ref.rollout.engine_kwargs.sglang.",
    "actor_rollout_ref.actor.optim.override_optimizer_config.",
    "actor_rollout_ref.rollout.name",
)
on_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "perf"), prepend=os.pathsep)
        return run_scenario("tests.nightly.perf.verl_scenario", tmp_path_factory.mktemp("verl"))


@on_cpu
def test_verl_knows_the_keys_and_accepts_the_values(found: dict[str, Any]):
    assert all(key.startswith(NOT_IN_THE_TREE) for key in found["unknown"])
    assert (found["engine"], found["trainer"]) == ("fsdp2", "verl.trainer.ppo.v1.trainer_sync")
    rollout = found["rollout"]
    assert (rollout["n"], rollout["prompt_length"], rollout["response_length"]) == (8, 1024, 5120)
    assert rollout["log_prob_use_dynamic_bsz"] and rollout["free_cache_engine"]
    assert rollout["engine_kwargs"]["sglang"] == {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "cuda_graph_backend_prefill": "disabled",
    }


@on_cpu
def test_verl_corrects_for_engines_in_fp8_as_ours_does(found: dict[str, Any]):
    """Settings that are a table of their own, which Hydra takes key by key."""
    assert found["fp8_engines"] == "fp8"
    correction = found["fp8_correction"]
    assert (correction["bypass_mode"], correction["rollout_is"]) == (True, "token")


@on_cpu
def test_verls_tool_agent_samples_and_calls_as_ours_does(found: dict[str, Any]):
    for theirs, ours in zip(found["verl"], found["ours"], strict=True):
        assert [turn["tokens"] for turn in theirs["turns"]] == [turn["tokens"] for turn in ours["turns"]]
        assert len(theirs["turns"]) == 3 and all(turn["ignore_eos"] for turn in theirs["turns"] + ours["turns"])
        assert sum(theirs["mask"]) == sum(ours["mask"]) == sum(turn["tokens"] for turn in ours["turns"])
        assert theirs["tool"].count(RESULT) == ours["tool"].count(RESULT) == 2
        # A turn cut at its length has no closing token: we write one before a result, verl does
        # not. verl keeps the line break at the end of a result.
        assert abs(len(theirs["mask"]) - len(ours["mask"])) <= 4
        assert theirs["logprobs"] == len(theirs["mask"]) and theirs["num_turns"] == ours["num_turns"] == 6
    assert len({str(each["turns"]) for each in found["verl"]}) == len(found["verl"]), "all draws are alike"


@on_cpu
def test_steps_are_read_from_verls_own_log(found: dict[str, Any]):
    [row] = found["logged"]  # the validation before it is none
    assert (row["step"], row["perf/total_num_tokens"], row["training/num_turns/max"]) == (1, 4800, 6)
    assert (row["tokens_per_s"], row["perf/throughput"]) == (400.0, 200.0)
    phases_s = [row[f"timing_s/{name}"] for name in found["phases"] if f"timing_s/{name}" in row]
    assert len(phases_s) == 5, "our trainer sums the same timers"
    assert row["timing_s/other"] == 0.25 and sum(phases_s) + 0.25 == row["timing_s/step"] == 12.0


@on_cpu
def test_about_half_of_the_responses_are_right(found: dict[str, Any]):
    assert set(found["scores"]) == {-1.0, 1.0}
    assert 60 < found["scores"].count(1.0) < 140


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("sft_7b_h200x2", "has kind 'sft'. Choose a case of kind 'rl'"),
        ("rl_7b_h200x2", "Install flash-attn. To run without it"),
    ],
)
def test_what_cannot_be_compared_is_refused(case: str, said: str, tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "perf/verl_bench.py", case, "--model", "m", "--data", "d"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()
