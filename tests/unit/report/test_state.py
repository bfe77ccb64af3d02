"""Running, ended or killed, told from the folder alone; and the command that goes on works."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.report.record import read_run
from retool_mcore.report.state import State, state_of, step_seconds
from retool_mcore.run import start
from retool_mcore.run.best import BestStep
from retool_mcore.run.folder import is_locked, lock_run
from tests.unit.report.generated import NOW_S, QUICKSTART, steps, write_run


def state(folder: Path) -> State:
    return state_of(read_run(folder))


def test_a_real_run_has_ended_and_its_export_is_evaluated_next():
    found = state(QUICKSTART / "tool_rl")
    assert (found.name, found.stage) == ("ended", "exported")
    assert found.go_on.startswith("retool eval ") and "--model tool_rl=" in found.go_on
    assert state(QUICKSTART / "sft").go_on == f"retool rl CONFIG model.path={QUICKSTART / 'sft' / 'export'}"


def test_a_run_without_its_export_is_exported_next(tmp_path: Path):
    found = state(write_run(tmp_path / "run", rows=steps(10)))
    assert (found.name, found.stage) == ("ended", "all steps made")
    assert found.go_on == f"retool export {tmp_path}/run --to {tmp_path}/run/export"


def test_a_run_that_ended_early_was_not_killed(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(6))
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text + '\n[best]\nmetric = "val/accuracy"\npatience = 2\n')
    values = {2: 0.5, 4: 0.25, 6: 0.5}
    best = BestStep(metric="val/accuracy", mode="max", patience=2, min_delta=0.0, values=values)
    (run / "best.json").write_text(best.to_json())
    found = state(run)
    assert (found.name, found.go_on.split()[-2:]) == ("ended", ["--checkpoint", "best"])
    assert found.stage == "early, after step 6: best val/accuracy 0.5 at step 2, not bettered in 2 validations"
    (run / "best.json").write_text(best.up_to(4).to_json())
    assert state(run).name == "killed"


def test_asking_does_not_keep_a_run_from_starting(tmp_path: Path):
    run = write_run(tmp_path / "run")
    assert not is_locked(run)  # there is no lock file yet, and none is made
    assert not (run / ".lock").exists()
    with lock_run(run):
        assert is_locked(run)
    assert not is_locked(run)
    with lock_run(run):
        pass


def test_the_stage_of_a_start_is_told_while_it_runs_and_when_it_was_killed(tmp_path: Path):
    run = write_run(tmp_path / "run")
    start.begin(run, "checks")
    start.begin(run, "engines")
    with lock_run(run):
        assert state(run).stage == "starting the rollout engines"
    assert state(run).stage == "while starting the rollout engines; no checkpoint"


def test_a_start_again_after_steps_is_at_its_stage_until_its_first_row(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(4))
    line = json.dumps({"stage": "engines", "unix_s": NOW_S + 5, "clock_s": 0.0})
    (run / "start.jsonl").write_text(line + "\n")
    with lock_run(run):
        assert state(run).stage == "starting the rollout engines"
    (run / "start.jsonl").write_text(line.replace(str(NOW_S + 5), str(NOW_S - 5)) + "\n")
    with lock_run(run):
        assert state(run).stage == "steps"


def test_a_start_has_come_to_its_first_row_whatever_was_done_to_the_clock(tmp_path: Path):
    """It was set back by an hour while the model was built."""
    run = write_run(tmp_path / "run")
    begun = [{"stage": "checks", "unix_s": NOW_S, "clock_s": 7.0}, {"stage": "steps", "unix_s": NOW_S, "clock_s": 47.5}]
    (run / "start.jsonl").write_text("".join(json.dumps(each) + "\n" for each in begun))
    with lock_run(run):
        assert state(run).stage == "sampling the first batch"
        row = {"step": 1, "unix_s": NOW_S - 3600.0, **start.start_times(run)}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert state(run).stage == "steps"


def test_a_folder_with_settings_alone_was_not_started(tmp_path: Path):
    assert state(write_run(tmp_path / "run")).name == "not started"


@pytest.mark.parametrize("name", ["tool_rl", "sft"])
def test_the_command_of_a_killed_run_names_that_folder_wherever_it_is_now(tmp_path: Path, name: str):
    moved = tmp_path / "with space" / "renamed"
    shutil.copytree(QUICKSTART / name, moved)
    lines = (moved / "metrics.jsonl").read_text().splitlines(keepends=True)
    (moved / "metrics.jsonl").write_text("".join(lines[:-2]))  # the last step, and its validation
    text = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(text.replace('resume = "auto"', 'resume = "never"'))
    retool, kind, config, *overrides = shlex.split(state(moved).go_on)
    assert (retool, kind) == ("retool", "sft" if name == "sft" else "rl")
    again = load_run(config, overrides)
    assert again.run.dir == moved and again.checkpoint.resume == "auto"


def test_the_time_of_a_step_is_that_of_the_newest_ones():
    slow, fast = steps(30, seconds=100.0), steps(25, seconds=2.0)
    rows = [*({**row, "unix_s": row["unix_s"] - 1000} for row in slow), *fast]
    assert step_seconds(rows) == pytest.approx(2.0)
    assert step_seconds(rows[:1]) is None
