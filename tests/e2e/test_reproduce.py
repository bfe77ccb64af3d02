"""launch/reproduce_retool.sh whole, on the CPU with the tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import MARK, ROOT, assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_one_command_goes_from_a_model_to_its_report(task: Path, tmp_path: Path, mark: str):
    out = tmp_path / "out"
    env = {
        **os.environ,
        MARK: mark,
        "PYTHON": sys.executable,
        "OUT": str(out),
        "BENCHMARKS": str(task / "eval.parquet"),
        "SAMPLES": "3",
        "SFT_CONFIG": "configs/sft_tiny_cpu.toml",
        "SFT_KEYS": f"train.steps=2 data.train_file={task}/sft_train.parquet data.val_file={task}/sft_val.parquet",
        "RL_CONFIG": "configs/rl_tiny_cpu.toml",
        "RL_KEYS": f'train.steps=1 data.train_file={task}/rl_train.parquet validation.files=["{task}/rl_val.parquet"]',
    }
    command = ["bash", "launch/reproduce_retool.sh", str(task / "model")]

    def go() -> str:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert_nothing_left(mark)
        return done.stdout

    assert "data fetch" not in go(), "all of the data was there"
    assert [row["step"] for row in read_metrics(out / "sft/metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_metrics(out / "rl/metrics.jsonl")] == [1]
    samples = {name: (out / "eval" / name / "samples.jsonl").read_text().count("\n") for name in ("sft", "rl")}
    assert samples == {"sft": 24, "rl": 24}
    assert (out / "report.html").stat().st_size > 10_000
    rows = {path: read_metrics(path) for path in out.glob("*/metrics.jsonl")}
    go()  # once more: every stage is done
    assert rows == {path: read_metrics(path) for path in rows}
