"""Broken pipes, full disks and a failing Hub: one line each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_mistakes import RL, ROOT


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("--help > /dev/full", 2, "error: no space is left. Complete files are kept"),
        (f"get {RL} run.name > /dev/full", 2, "error: no space is left. Complete files are kept"),
        ("parse < /dev/null <&-", 2, "error: standard input is closed, but the turn is read from it."),
        (f"get {RL} run.name | true", 0, ""),
        (f"runs {ROOT}/tests/report/view >&- 2>&-", 0, ""),
    ],
)
def test_closed_and_full_ends_of_a_pipe_leave_no_traceback(command: str, code: int, message: str):
    line = f"{sys.executable} -m retool_mcore {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr.strip()[: len(message)]) == (code, message), done.stderr
    assert done.stderr.count("\n") == bool(message)


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path):
    """Node without a network: huggingface_hub would ask six times and print a line for each."""
    settings = ["model.path=Qwen/Qwen3-0.6B", "data.train_file=absent.parquet", 'validation.files=["absent.parquet"]']
    argv = [sys.executable, "-m", "retool_mcore", "sft", "configs/sft_tiny_cpu.toml", *settings]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 2 and "Retrying" not in done.stderr, done.stderr
    assert "Connection refused" in done.stderr and "hf download Qwen/Qwen3-0.6B" in " ".join(done.stderr.split())
