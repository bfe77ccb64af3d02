"""launch/stages.sh: what is done is skipped, and the first stage that fails ends the recipe."""

import os
import re
import subprocess
from pathlib import Path

from tests.e2e.commands import ROOT


def stage(out: Path, result: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Carry out one stage that appends to a log, as a recipe does."""
    return recipe(out, f"stage one {result} sh -c '{command}'", "echo the next stage", **env)


def recipe(out: Path, *lines: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = out / "recipe.sh"
    out.mkdir(exist_ok=True)
    script.write_text("\n".join(["set -euo pipefail", "source launch/stages.sh", *lines, ""]))
    words = {"OUT": str(out), **env}
    return subprocess.run(
        ["bash", str(script)],
        cwd=ROOT,
        env=os.environ | words,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_stage_runs_once_while_its_result_is_there_and_its_command_is_the_same(tmp_path: Path):
    result, log = tmp_path / "result", tmp_path / "log"
    command = f"echo ran >>{log}; touch {result}"
    first, second = (stage(tmp_path / "out", result, command) for _ in range(2))
    assert log.read_text() == "ran\n" and "already done" in second.stdout and "already done" not in first.stdout
    result.unlink()
    stage(tmp_path / "out", result, command)
    assert log.read_text() == "ran\n" * 2, "without its result it is not done"
    stage(tmp_path / "out", result, command + "; true")
    assert log.read_text() == "ran\n" * 3, "another command is another stage"


def test_a_finished_recipe_is_done_at_once_while_its_results_are_there(tmp_path: Path):
    out, result, log = tmp_path / "out", tmp_path / "result", tmp_path / "log"
    lines = (
        f"finished 'a b' {result} && exit 0",
        f"echo ran >>{log}",
        f"stage one {result} touch {result}",
        "finish 'a b'",
    )
    assert recipe(out, *lines).returncode == 0
    again = recipe(out, *lines)
    assert again.returncode == 0 and again.stdout == f"already done: {result}\n"
    assert log.read_text() == "ran\n"
    recipe(out, *(line.replace("a b", "a c") for line in lines))
    result.unlink()
    recipe(out, *lines)
    assert log.read_text() == "ran\n" * 3, "other words, and without its result"


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
