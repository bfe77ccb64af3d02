"""The gate: what it lets through, what it stops, and what it refuses to compare."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = (1.00, 1.02, 0.99, 1.01, 1.00, 0.98, 1.03, 1.00, 1.01, 0.99)


def record(scale: float = 1.0, tokens: float = 1000.0, **changed: Any) -> dict[str, Any]:
    steps = [{"tokens": tokens, "time_step_s": s * scale + 5.0, "time_checkpoint_s": 5.0} for s in SECONDS]
    provenance = {
        "commit": "0123456789",
        "hardware": {"devices": ["NVIDIA H200"], "used": 2},
        "settings": {"model": {"fp8": "off"}},
    }
    made = {
        "case": "sft_7b_h200x2",
        "exit_code": 0,
        "steps": steps,
        "lengths": {"total": tokens * len(steps)},
        "summary": {"time_step_s": scale},
        "provenance": provenance,
    }
    return made | changed


def compare(folder: Path, head: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    for name, content in (("head", head), ("base", record())):
        (folder / f"{name}.json").write_text(json.dumps(content))
    argv = [sys.executable, "perf/compare.py", str(folder / "head.json"), str(folder / "base.json"), *more]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("scale", "more", "code", "said"),
    [
        (1.0, (), 0, "no difference"),
        (1.02, (), 0, "no difference"),
        (1.10, (), 1, "slower"),
        (0.80, (), 1, "faster, and nobody has said why"),
        (0.80, ("--explained", "a fused kernel"), 0, "faster, as explained: a fused kernel"),
    ],
)
def test_only_an_unexplained_difference_beyond_the_threshold_fails(
    scale: float, more: tuple[str, ...], code: int, said: str, tmp_path: Path
):
    done = compare(tmp_path, record(scale), *more)
    assert done.returncode == code, done.stderr
    assert said in done.stdout


def test_a_run_that_was_asked_to_stop_counts_with_the_steps_it_measured(tmp_path: Path):
    assert "no difference" in compare(tmp_path, record(exit_code=143)).stdout


@pytest.mark.parametrize("path", sorted((ROOT / "perf" / "baselines").glob("*.json")), ids=lambda path: path.stem)
def test_every_baseline_is_found_by_its_case_and_hardware(path: Path):
    argv = [sys.executable, "perf/compare.py", str(path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "time of a token: 1.0000 of the baseline's" in done.stdout, done.stderr


def other_hardware() -> dict[str, Any]:
    made = record()
    made["provenance"]["hardware"]["devices"] = ["NVIDIA H100"]
    return made


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (record(tokens=900.0), "not comparable: 900 tokens a step, the baseline's are 1000"),
        (other_hardware(), "hardware is NVIDIA_H100x2, the baseline's is NVIDIA_H200x2"),
        (record(exit_code=1), "is of a run that failed"),
        (record(exit_code=143, steps=[]), "measured no step"),
        (record(case="sft_tiny_cpu"), "case is sft_tiny_cpu"),
    ],
)
def test_other_work_or_hardware_is_refused(head: dict[str, Any], said: str, tmp_path: Path):
    done = compare(tmp_path, head)
    assert done.returncode == 2 and said in done.stderr.replace("\n", " ")
