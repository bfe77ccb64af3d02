"""The recipes of several stages: what is done stays, and what failed is not taken for done."""

import subprocess
from pathlib import Path

import pytest

from tests.launch.test_launch import ROOT, run

GSM8K = ROOT / "launch" / "gsm8k_gpu1.sh"


def stage(out: Path, result: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Carry out one stage that appends to a log, as a recipe does."""
    script = out / "recipe.sh"
    out.mkdir(exist_ok=True)
    script.write_text(
        "set -euo pipefail\nsource launch/nodes.sh\nsource launch/stages.sh\n"
        f"stage one {result} sh -c '{command}'\necho the next stage\n"
    )
    return run(script, OUT=str(out), **env)


def test_a_stage_runs_once_while_its_result_is_there_and_its_command_is_the_same(tmp_path: Path):
    result, log = tmp_path / "result", tmp_path / "log"
    command = f"echo ran >>{log}; touch {result}"
    first, second = (stage(tmp_path / "out", result, command) for _ in range(2))
    assert log.read_text() == "ran\n" and "done before" in second.stdout and "done before" not in first.stdout
    result.unlink()
    stage(tmp_path / "out", result, command)
    assert log.read_text() == "ran\n" * 2, "without its result it is not done"
    stage(tmp_path / "out", result, command + "; true")
    assert log.read_text() == "ran\n" * 3, "another command is another stage"


def test_a_stage_that_fails_ends_the_recipe_and_is_not_done(tmp_path: Path):
    result, log = tmp_path / "result", tmp_path / "log"
    command = f"echo ran >>{log}; touch {result}; exit 7"
    for times in (1, 2):
        failed = stage(tmp_path / "out", result, command)
        assert failed.returncode == 7 and "the next stage" not in failed.stdout
        assert log.read_text() == "ran\n" * times


def test_a_dry_run_shows_a_stage_and_makes_nothing(tmp_path: Path):
    result = tmp_path / "result"
    shown = stage(tmp_path / "out", result, f"touch {result}", DRY_RUN="1")
    assert shown.returncode == 0 and f"# sh -c touch {result}" in shown.stdout
    assert not result.exists() and not (tmp_path / "out" / "stages").exists()


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("train.steps=3",)])
def test_the_gsm8k_recipe_wants_a_model_first(words: tuple[str, ...]):
    done = run(GSM8K, *words)
    assert done.returncode == 2 and f"given: {' '.join(words) or 'nothing'}" in done.stderr and not done.stdout


def test_the_gsm8k_recipe_knows_two_kinds_of_problems():
    done = run(GSM8K, "some/model", PROBLEMS="small")
    assert done.returncode == 2 and "PROBLEMS = small is not plain or large" in done.stderr
