"""launch/stages.sh: what is done is skipped, with the same command and while its result exists."""

import os
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
