"""The GSM8K recipe: what it checks first, and what is done stays."""

from pathlib import Path

from tests.nightly.launch.test_launch import ROOT, run

GSM8K = ROOT / "launch" / "gsm8k_gpu1.sh"


def test_the_gsm8k_recipe_wants_a_model_and_checks_and_plans_before_it_makes_anything(tmp_path: Path):
    done = run(GSM8K, "train.steps=3")
    assert done.returncode == 2 and "the arguments were: train.steps=3" in done.stderr and not done.stdout
    python, out = tmp_path / "python", tmp_path / "out"
    stand_in = 'case $* in *"data protocol"*) echo hermes ;; *preflight*rl*) sleep 1; exit 2 ;; esac'
    python.write_text(f'#!/bin/sh\necho "$3" >>{tmp_path}/calls\n{stand_in}\n')
    python.chmod(0o755)
    assert run(GSM8K, "some/model", OUT=str(out), PYTHON=str(python), HARDWARE="h100x1").returncode == 2
    calls = (tmp_path / "calls").read_text().split()
    assert {"preflight", "plan"} < set(calls) <= {"data", "get", "preflight", "plan"} and not out.exists()
