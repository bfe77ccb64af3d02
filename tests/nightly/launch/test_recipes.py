"""The recipes of several stages: what is done stays, and what failed is not taken for done."""

import re
from pathlib import Path

import pytest

from tests.e2e.test_stages import recipe, stage
from tests.nightly.launch.test_launch import ROOT, run

GSM8K = ROOT / "launch" / "gsm8k_gpu1.sh"


def test_a_stage_that_fails_ends_the_recipe_and_is_not_done(tmp_path: Path):
    result, log = tmp_path / "result", tmp_path / "log"
    command = f"echo ran >>{log}; touch {result}; exit 7"
    for times in (1, 2):
        failed = stage(tmp_path / "out", result, command)
        assert failed.returncode == 7 and "the next stage" not in failed.stdout
        assert log.read_text() == "ran\n" * times


def test_two_stages_run_at_once_and_each_line_has_the_name_of_its_stage(tmp_path: Path):
    out, here, there = tmp_path / "out", tmp_path / "here", tmp_path / "there"
    wait = "while [ ! -e {} ]; do sleep 0.1; done; echo seen; echo error >&2"  # each waits for the other
    lines = (
        f"in_background one {here} sh -c 'touch {here}; {wait.format(there)}; sleep 2'",
        f"in_background two {there} sh -c 'touch {there}; {wait.format(here)}'",
        "wait_for_all",
        "echo the next stage",
    )
    done = recipe(out, *lines)
    assert done.returncode == 0, done.stderr
    output = done.stdout.splitlines()
    assert {"one: seen", "one: error", "two: seen", "two: error"} <= set(output) and "error" not in done.stderr
    took = [each.split(": ")[0] for each in output if re.fullmatch(r"(one|two): \d+ s", each)]
    assert took == ["two", "one"], "each prints its time when it ends"
    assert output[-1] == "the next stage"
    assert {each.name for each in (out / "stages").iterdir()} == {"one", "two"}
    again = recipe(out, *lines)
    assert again.stdout.count("already done") == 2 and again.stdout.splitlines()[-1] == "the next stage"


def test_a_failed_parallel_stage_ends_the_recipe_and_the_others_at_once(tmp_path: Path):
    out, result, ended = tmp_path / "out", tmp_path / "result", tmp_path / "ended"
    lasting = f'trap "touch {ended}; exit 0" TERM; while true; do sleep 0.1; done'
    stages = (
        f"in_background one {result} sh -c '{lasting}'",
        f"in_background two {result} sh -c 'sleep 1; exit 7'",
        f"in_background three {result} touch {result}",
    )
    failed = recipe(out, *stages, "wait_for_all", "echo the next stage")
    assert failed.returncode == 7 and "the next stage" not in failed.stdout and ended.exists()
    assert [each.name for each in (out / "stages").iterdir()] == ["three"]


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
