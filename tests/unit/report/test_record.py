"""A run's folder is read once and whole; a damaged or foreign one gives one clear error."""

import os
from pathlib import Path

import pytest

from retool_mcore.errors import DataError
from retool_mcore.report.record import MetricsFile, read_run, runs_below
from tests.unit.report.generated import QUICKSTART, steps, write_rows, write_run


def test_a_real_run_is_read_with_all_that_it_left():
    run = read_run(QUICKSTART / "tool_rl")
    assert (run.kind, run.name, run.step, run.steps) == ("rl", "tool_rl", 24, 24)
    assert run.checkpoints == [16, 24] and run.exported
    assert [stage for stage, _ in run.begun][:2] == ["checks", "ray"]
    assert run.series("accuracy")[0] == (1, 0.34375)
    assert run.setting("rollout.group_size") == 8 and run.setting("no.such", 3) == 3
    assert read_run(QUICKSTART / "sft").kind == "sft"


def broken(folder: Path, file: str, content: bytes) -> None:
    write_run(folder, rows=steps(3))
    (folder / file).write_bytes(content)


DAMAGES = {
    "no TOML": ("config.toml", b"[run\n", "cannot be read as a run's settings"),
    "no text": ("config.toml", b"\xff\xfe", "cannot be read as a run's settings"),
    "a foreign TOML": ("config.toml", b"[project]\nname = 'x'\n", "holds no settings of a run"),
    "sections that are none": ("config.toml", b"run = 3\ntrain = 4\n", "holds no settings of a run"),
    "steps in words": ("config.toml", b"[run]\nname='a'\n[train]\nsteps='many'\n", "holds no settings of a run"),
    "a broken row": ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', r"metrics.jsonl, line 2, is not JSON"),
    "a row of bytes": ("metrics.jsonl", b"\xff\xfe\n", r"metrics.jsonl, line 1, is not JSON"),
    "a row without a step": ("metrics.jsonl", b'{"loss": 1}\n', "line 1, is not a row of metrics"),
    "a step that is no number": ("metrics.jsonl", b'{"step": NaN}\n', "line 1, is not a row of metrics"),
    "a row of texts": ("metrics.jsonl", b'{"step": 1, "loss": "low"}\n', "line 1, is not a row of metrics"),
    "a list": ("metrics.jsonl", b"[1]\n", "line 1, is not a row of metrics"),
    "stages of another kind": ("start.jsonl", b'{"name": 1}\n', "start.jsonl is damaged"),
    "stages of no kind": ("start.jsonl", b"3\n", "start.jsonl is damaged"),
    "stages in bytes": ("start.jsonl", b"\xff\n", "start.jsonl is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_in_one_error(tmp_path: Path, damage: str):
    file, content, words = DAMAGES[damage]
    broken(tmp_path / "run", file, content)
    with pytest.raises(DataError, match=words) as caught:
        read_run(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)


def test_a_folder_that_is_no_run_names_the_runs_in_it(tmp_path: Path):
    write_run(tmp_path / "a" / "one")
    with pytest.raises(DataError, match=r"no config.toml\. Name one of these: .*a/one"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="there is no such folder"):
        read_run(tmp_path / "nowhere")


def test_a_last_line_that_a_kill_cut_is_left_out(tmp_path: Path):
    write_run(tmp_path, rows=steps(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_run(tmp_path).step == 3


def test_values_that_are_not_finite_are_not_drawn(tmp_path: Path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": float("inf")}]
    run = read_run(write_run(tmp_path, rows=rows))
    assert run.series("loss") == [(1, 2.0)] and run.step == 3


def test_a_growing_file_is_read_on_and_a_replaced_one_afresh(tmp_path: Path):
    write_rows(tmp_path, steps(2))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    first = file.look()
    with file.path.open("a") as grown:
        grown.write('{"step": 3}\n{"step"')
        grown.flush()
        assert [row["step"] for row in file.look()] == [1, 2, 3]
        assert file.look()[0] is first[0]  # the first rows were not parsed again
        grown.write(": 4}\n")
    assert [row["step"] for row in file.look()] == [1, 2, 3, 4]
    (tmp_path / "new").write_text(
        '{"step": 1}\n{"step": 9, "loss": 1.0}\n{"step": 9, "val/accuracy": 0.5}\n' + '{"step": 10}\n' * 40
    )
    os.replace(tmp_path / "new", file.path)  # as a resumed run does
    assert file.look() == [{"step": 1}, {"step": 9, "loss": 1.0, "val/accuracy": 0.5}, {"step": 10}]
    file.path.unlink()
    assert file.look() == []


def test_runs_are_found_below_a_root_but_not_inside_runs(tmp_path: Path):
    write_run(tmp_path / "b")
    write_run(tmp_path / "a" / "deep" / "one")
    write_run(tmp_path / "b" / "checkpoints" / "inner")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a")
    assert runs_below(tmp_path) == [tmp_path / "a" / "deep" / "one", tmp_path / "b"]
    assert runs_below(tmp_path / "b") == [tmp_path / "b"]
