"""launch/reproduce_retool.sh and launch/gsm8k_gpu1.sh whole, on the CPU with the tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import MARK, ROOT, assert_nothing_left

pytestmark = [pytest.mark.timeout(900)]
CONFIGS = {"SFT_CONFIG": "configs/sft_tiny_cpu.toml", "RL_CONFIG": "configs/rl_tiny_cpu.toml"}


def launch(script: str, model: Path, mark: str, **env: str) -> str:
    """The output of a launch script that must end well."""
    whole = {**os.environ, **CONFIGS, MARK: mark, "PYTHON": sys.executable, **env}
    done = subprocess.run(
        ["bash", f"launch/{script}.sh", str(model)], cwd=ROOT, env=whole, text=True, timeout=800, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert_nothing_left(mark)
    return done.stdout


def test_one_command_goes_from_a_model_to_its_report(task: Path, tmp_path: Path, mark: str):
    out = tmp_path / "out"
    files = {
        kind: f'data.train_file={task}/{kind}_train.parquet validation.files=["{task}/{kind}_val.parquet"]'
        for kind in ("sft", "rl")
    }
    env = {
        "OUT": str(out),
        "BENCHMARKS": str(task / "eval.parquet"),
        "SAMPLES": "3",
        "SFT_KEYS": f"train.steps=2 {files['sft']}",
        "RL_KEYS": f"train.steps=1 {files['rl']}",
    }
    assert "data fetch" not in launch("reproduce_retool", task / "model", mark, **env), "all of the data was there"
    assert [row["step"] for row in read_metrics(out / "sft/metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_metrics(out / "rl/metrics.jsonl")] == [1]
    samples = {name: (out / "eval" / name / "samples.jsonl").read_text().count("\n") for name in ("sft", "rl")}
    assert samples == {"sft": 24, "rl": 24}
    assert (out / "report.html").stat().st_size > 10_000
    rows = {path: read_metrics(path) for path in out.glob("*/metrics.jsonl")}
    launch("reproduce_retool", task / "model", mark, **env)  # once more: every stage is done
    assert rows == {path: read_metrics(path) for path in rows}


def test_gsm8k_goes_from_its_solutions_to_a_report_and_on_after_a_kill(task: Path, tmp_path: Path, mark: str):
    out, gsm8k = tmp_path / "out", tmp_path / "gsm8k"
    rows = (ROOT / "tests/data/samples/gsm8k_60.jsonl").read_text().splitlines(keepends=True)
    gsm8k.mkdir()
    (gsm8k / "train.jsonl").write_text("".join(rows))
    (gsm8k / "test.jsonl").write_text("".join(rows[:3]))
    env = {
        "OUT": str(out),
        "GSM8K": str(gsm8k),
        "HARDWARE": "h100x1",
        "SFT_KEYS": "train.steps=2 data.max_length_tokens=1024 cluster.gpus_per_node=1",
        "RL_KEYS": "train.steps=1 train.prompts_per_step=4 train.mini_batch_prompts=4 rollout.group_size=2 "
        "data.max_prompt_tokens=920 rollout.max_response_tokens=100 data.allow_overlap=true",
    }

    def go() -> str:
        return launch("gsm8k_gpu1", task / "model", mark, **env)

    output = go()
    assert "step 1/1" in output and "step 2/2" in output
    cases = {f"{name}{form}" for name in ("base", "sft", "tool_rl", "text_rl") for form in ("", "_text")}
    assert {path.parent.name for path in out.glob("eval/*/*/report.json")} == cases
    report = (out / "report.html").read_text()
    assert all(name in report for name in ("tool_rl", "text_rl", "sft"))
    assert go() == f"already done: {out}/report.html\n"
    (out / "report.html").unlink()
    again = go()
    assert again.count("already done") == output.count(f"\n# {sys.executable} ") - 1 and "step 1/1" not in again
