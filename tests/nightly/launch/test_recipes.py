"""The GSM8K recipe: what it checks first, and what is done stays."""

from pathlib import Path

import pytest

from tests.nightly.launch.test_launch import ROOT, run

GSM8K = ROOT / "launch" / "gsm8k_gpu1.sh"


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("train.steps=3",)])
def test_the_gsm8k_recipe_wants_a_model_first(words: tuple[str, ...]):
    done = run(GSM8K, *words)
    assert (
        done.returncode == 2 and f"the arguments were: {' '.join(words) or 'none'}" in done.stderr and not done.stdout
    )


def test_the_gsm8k_recipe_checks_and_plans_before_it_makes_anything(tmp_path: Path):
    python, out = tmp_path / "python", tmp_path / "out"
    stand_in = 'case $* in *"data protocol"*) echo hermes ;; *preflight*rl*) sleep 1; exit 2 ;; esac'
    python.write_text(f'#!/bin/sh\necho "$3" >>{tmp_path}/calls\n{stand_in}\n')
    python.chmod(0o755)
    assert run(GSM8K, "some/model", OUT=str(out), PYTHON=str(python), HARDWARE="h100x1").returncode == 2
    calls = (tmp_path / "calls").read_text().split()
    assert {"preflight", "plan"} < set(calls) <= {"data", "get", "preflight", "plan"} and not out.exists()


def test_a_finished_gsm8k_recipe_starts_no_python_again(tmp_path: Path):
    for name in (
        "sft/export",
        "tool_rl/export",
        "text_rl/export",
        "eval/text_rl/text_rl_text/report.json",
        "report.html",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "stages").mkdir()
    configs = "configs/sft_gsm8k_gpu1.toml configs/rl_gsm8k_gpu1.toml"
    (tmp_path / "stages" / "recipe").write_text(f"some/model {tmp_path} data/gsm8k {configs}    plain ")
    done = run(GSM8K, "some/model", OUT=str(tmp_path), PYTHON="false")
    assert (done.returncode, done.stdout) == (0, f"already done: {tmp_path}/report.html\n"), done.stderr
