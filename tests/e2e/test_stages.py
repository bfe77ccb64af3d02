"""launch/stages.sh: what is done is skipped, and the first stage that fails ends the recipe."""

import os
import subprocess
from pathlib import Path

from tests.e2e.commands import ROOT


def recipe(out: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    script = out / "recipe.sh"
    out.mkdir(exist_ok=True)
    script.write_text("\n".join(["set -euo pipefail", "source launch/stages.sh", *lines, "echo the next stage", ""]))
    env = os.environ | {"OUT": str(out)}
    return subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_stage_runs_once_while_its_result_is_there_and_its_command_is_the_same(tmp_path: Path):
    result, log = tmp_path / "result", tmp_path / "log"

    def stage(more: str = "") -> subprocess.CompletedProcess[str]:
        return recipe(tmp_path / "out", f"stage one {result} sh -c 'echo ran >>{log}; touch {result}{more}'")

    first, second = stage(), stage()
    assert log.read_text() == "ran\n" and "already done" in second.stdout and "already done" not in first.stdout
    result.unlink()
    stage()
    assert log.read_text() == "ran\n" * 2, "without its result it is not done"
    stage("; true")
    assert log.read_text() == "ran\n" * 3, "another command is another stage"
    for times in (4, 5):
        failed = stage("; exit 7")
        assert failed.returncode == 7 and "the next stage" not in failed.stdout
        assert log.read_text() == "ran\n" * times, "a stage that failed is not done"


def test_parallel_stages_run_at_once_and_the_first_that_fails_ends_all(tmp_path: Path):
    out, here, there, ended = (tmp_path / name for name in ("out", "here", "there", "ended"))
    meet = "touch {}; while [ ! -e {} ]; do sleep 0.1; done"
    stages = [
        f"in_background one {here} sh -c '{meet.format(here, there)}'",
        f"in_background two {there} sh -c '{meet.format(there, here)}'",
        "wait_for",
    ]
    assert recipe(out, *stages).stdout.splitlines()[-1] == "the next stage"
    assert recipe(out, *stages).stdout.count("already done") == 2
    lasting = f'trap "touch {ended}; exit 0" TERM; while true; do sleep 0.1; done'
    stages[:2] = [
        f"in_background three {here} sh -c '{lasting}'",
        f"in_background four {here} sh -c 'sleep 1; exit 7'",
        f"in_background five {here} touch {here}",
    ]
    failed = recipe(out, *stages)
    assert failed.returncode == 7 and "the next stage" not in failed.stdout and ended.exists()
    assert {each.name for each in (out / "stages").iterdir()} == {"one", "two", "five"}


def test_a_stage_is_waited_for_while_another_runs_on(tmp_path: Path):
    out, slow, quick, go = (tmp_path / name for name in ("out", "slow", "quick", "go"))
    stages = [
        f"in_background slow {slow} sh -c 'while [ ! -e {go} ]; do sleep 0.1; done; touch {slow}'",
        f"in_background quick {quick} touch {quick}",
        "wait_for quick",
        f"ls {quick} && [ ! -e {slow} ] && touch {go}",
        "wait_for slow",
        f"ls {slow}",
    ]
    done = recipe(out, *stages)
    assert done.returncode == 0 and str(slow) in done.stdout.splitlines()[-2]

    lasting = f"in_background lasting {tmp_path / 'lasting'} sleep 250"
    failed = recipe(out, lasting, f"in_background failing {tmp_path / 'failing'} sh -c 'exit 7'", "wait_for lasting")
    assert failed.returncode == 7 and "the next stage" not in failed.stdout


def test_a_check_runs_while_a_stage_runs_and_its_failure_ends_the_recipe(tmp_path: Path):
    out, slow, go, ended = (tmp_path / name for name in ("out", "slow", "go", "ended"))
    stages = [
        "check plan echo it fits",
        f"in_background slow {slow} sh -c 'while [ ! -e {go} ]; do sleep 0.1; done; touch {slow}'",
        "wait_for_checks",
        f"[ ! -e {slow} ] && touch {go}",
        "wait_for",
        f"ls {slow}",
    ]
    done = recipe(out, *stages)
    assert done.returncode == 0 and "plan: it fits" in done.stdout and str(slow) in done.stdout.splitlines()[-2]
    assert [each.name for each in (out / "stages").iterdir()] == ["slow"], "a check has no record"

    lasting = f'trap "touch {ended}; exit 0" TERM; touch {go}; while true; do sleep 0.1; done'
    go.unlink()
    stages[:2] = [
        f"check plan sh -c 'while [ ! -e {go} ]; do sleep 0.1; done; exit 7'",
        f"in_background lasting {tmp_path / 'lasting'} sh -c '{lasting}'",
    ]
    failed = recipe(out, *stages)
    assert failed.returncode == 7 and "the next stage" not in failed.stdout and ended.exists()
