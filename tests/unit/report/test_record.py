"""A run's folder is read once; a damaged one gives one error; its state and next command."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.errors import DataError
from retool_mcore.report.record import State, read_run, runs_below, state_of, step_seconds
from retool_mcore.run import start
from retool_mcore.run.checkpoint import BestStep
from retool_mcore.run.folder import lock_run
from retool_mcore.run.progress import MetricsFile
from tests.unit.report.generated import NOW_S, QUICKSTART, steps, write_rows, write_run


def state(folder: Path) -> State:
    return state_of(read_run(folder))


def test_a_real_run_is_read_with_all_that_it_left_and_its_export_is_evaluated_next():
    folder = QUICKSTART / "tool_rl"
    run = read_run(folder)
    assert (run.kind, run.name, run.step, run.steps) == ("rl", "tool_rl", 24, 24)
    assert run.checkpoints == [16, 24] and run.exported
    assert [stage for stage, _ in run.begun][:2] == ["checks", "ray"]
    assert run.series("accuracy")[0] == (1, 0.34375)
    assert run.setting("rollout.group_size") == 8 and run.setting("no.such", 3) == 3
    found = state_of(run)
    assert (found.name, found.stage) == ("ended", "exported")
    words = ["retool", "eval", f"{folder}/config.toml", "--model", f"tool_rl={folder}/export", "--out"]
    assert shlex.split(found.next_command) == [*words, f"{folder}/eval"]
    assert state(QUICKSTART / "sft").next_command == f"retool rl CONFIG model.path={QUICKSTART / 'sft' / 'export'}"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.toml", b"[run\n", "cannot be read as a run's settings"),
        ("config.toml", b"[project]\nname = 'x'\n", "has no settings of a run"),
        ("config.toml", b"[run]\nname='a'\n[train]\nsteps='many'\n", "has no settings of a run"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', r"metrics.jsonl, line 2, is not JSON"),
        ("metrics.jsonl", b'{"step": NaN}\n', "line 1, is not a row of metrics"),
        ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', "line 1, is not a row of metrics"),
        ("start.jsonl", b'{"name": 1}\n', "start.jsonl is damaged"),
    ],
)
def test_a_damaged_file_is_named_in_one_error(tmp_path: Path, file: str, content: bytes, message: str):
    write_run(tmp_path / "run", rows=steps(3))
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_run(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)


def test_values_that_are_not_finite_are_not_drawn(tmp_path: Path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": float("inf")}]
    run = read_run(write_run(tmp_path, rows=rows))
    assert run.series("loss") == [(1, 2.0)] and run.step == 3


def test_a_growing_file_is_read_on_and_a_replaced_one_afresh(tmp_path: Path):
    write_rows(tmp_path, steps(2))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    first = file.read()
    with file.path.open("a") as grown:
        grown.write('{"step": 3}\n{"step"')
        grown.flush()
        assert [row["step"] for row in file.read()] == [1, 2, 3]
        assert file.read()[0] is first[0]  # the first rows were not parsed again
        grown.write(": 4}\n")
    assert [row["step"] for row in file.read()] == [1, 2, 3, 4]
    (tmp_path / "new").write_text(
        '{"step": 1}\n{"step": 9, "loss": 1.0}\n{"step": 9, "val/accuracy": 0.5}\n' + '{"step": 10}\n' * 40
    )
    os.replace(tmp_path / "new", file.path)  # as a resumed run does
    assert file.read() == [{"step": 1}, {"step": 9, "loss": 1.0, "val/accuracy": 0.5}, {"step": 10}]


def test_runs_are_found_below_a_root_but_not_inside_runs(tmp_path: Path):
    write_run(tmp_path / "b")
    write_run(tmp_path / "a" / "very" / "deep" / "one")
    write_run(tmp_path / "a" / "much" / "too" / "deep" / "one")
    write_run(tmp_path / "b" / "checkpoints" / "inner")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a")
    found = [tmp_path / "a" / "very" / "deep" / "one", tmp_path / "b"]
    assert runs_below(tmp_path) == found and runs_below(tmp_path / "b") == found[1:]
    with pytest.raises(DataError, match=r"no config.toml\. Name one of these: .*a/very/deep/one"):
        read_run(tmp_path)


def test_a_run_without_its_export_is_exported_next(tmp_path: Path):
    found = state(write_run(tmp_path / "run", rows=steps(10)))
    assert (found.name, found.stage) == ("ended", "all steps done")
    assert found.next_command == f"retool export {tmp_path}/run --to {tmp_path}/run/export"


def test_a_run_that_ended_early_was_not_killed(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(6), best={"metric": "val/accuracy", "patience": 2})
    values = {2: 0.5, 4: 0.25, 6: 0.5}
    best = BestStep(metric="val/accuracy", mode="max", patience=2, min_delta=0.0, values=values)
    (run / "best.json").write_text(best.to_json())
    found = state(run)
    assert (found.name, found.next_command.split()[-2:]) == ("ended", ["--checkpoint", "best"])
    assert found.stage == "early, after step 6: best val/accuracy 0.5 at step 2, no improvement in 2 validations"
    (run / "best.json").write_text(best.up_to(4).to_json())
    for step, file in ((4, "state.json"), (6, "data.pt")):
        (run / f"checkpoints/global_step_{step}").mkdir(parents=True)
        (run / f"checkpoints/global_step_{step}" / file).touch()
    found = state(run)
    assert (found.name, found.stage) == ("killed", "after step 6; checkpoint of step 4")


def test_the_stage_of_a_start_is_told_until_its_first_row_and_when_it_was_killed(tmp_path: Path):
    run = write_run(tmp_path / "run")
    command = f"retool rl {run}/config.toml"
    assert state(run) == State(name="not started", stage="never started", next_command=command)
    start.begin(run, "checks")
    start.begin(run, "engines")
    stage = "while starting the rollout engines; no checkpoint"
    assert state(run) == State(name="killed", stage=stage, next_command=command)
    with lock_run(run):
        assert state(run).stage == "starting the rollout engines"
        assert state(run).next_command == f"retool watch {run}"
        row = {"step": 1, "unix_s": NOW_S - 1e9, **start.start_times(run)}  # the clock was set back meanwhile
        write_rows(run, [row])
        assert state(run).stage == "steps"


@pytest.mark.parametrize("name", ["tool_rl", "sft"])
def test_the_command_of_a_killed_run_names_that_folder_wherever_it_is_now(tmp_path: Path, name: str):
    moved = tmp_path / "with space" / "renamed"
    shutil.copytree(QUICKSTART / name, moved)
    lines = (moved / "metrics.jsonl").read_text().splitlines(keepends=True)
    (moved / "metrics.jsonl").write_text("".join(lines[:-2]))  # the last step, and its validation
    text = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(text.replace('resume = "auto"', 'resume = "never"'))
    retool, kind, config, *overrides = shlex.split(state(moved).next_command)
    assert (retool, kind) == ("retool", "sft" if name == "sft" else "rl")
    again = load_run(config, overrides)
    assert again.run.dir == moved and again.checkpoint.resume == "auto"


def test_the_time_of_a_step_is_that_of_the_newest_ones():
    slow, fast = steps(30, seconds=100.0), steps(25, seconds=2.0)
    rows = [*({**row, "unix_s": row["unix_s"] - 1000} for row in slow), *fast]
    assert step_seconds(rows) == pytest.approx(2.0)
    assert step_seconds(rows[:1]) is None
