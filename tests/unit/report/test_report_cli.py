"""`retool report`, `retool runs` and `retool watch` as a user types them."""

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from retool_mcore.cli.main import all_commands
from retool_mcore.report.table import find_runs, runs_table
from retool_mcore.run.folder import lock_run
from tests.unit.report.generated import QUICKSTART, steps, write_evaluation, write_run


def retool(*argv: object) -> Result:
    return CliRunner().invoke(all_commands(), [str(each) for each in argv])


def test_report_says_where_it_lies_and_what_it_left_out(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(3, reward=0.2))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "report.json").write_text("[]")
    done = retool("report", run, "--out", tmp_path / "r.html")
    assert done.exit_code == 0 and done.stdout == f"wrote {tmp_path}/r.html\n"
    assert "note: Left out:" in done.stderr and "plots/report.json" in done.stderr


def test_report_takes_evaluations_from_elsewhere(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "run", rows=steps(3))
    write_evaluation(tmp_path / "far" / "after", f"{run}/export", [1, 2, 3])
    done = retool("report", run, "--out", tmp_path / "r.md", "--eval", tmp_path / "far")
    assert done.exit_code == 0 and "0.500 (0.450 to 0.550)" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize("command", [("report", "--out", "x.html"), ("watch",)])
@pytest.mark.parametrize("folder", ["nowhere", "foreign", "damaged"])
def test_a_folder_that_is_no_whole_run_is_one_error(tmp_path: Path, command: tuple[str, ...], folder: str):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.toml").write_text("[tool]\nx = 1\n")
    (write_run(tmp_path / "damaged") / "metrics.jsonl").write_bytes(b"\x00\n")
    done = retool(command[0], tmp_path / folder, *command[1:])
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and folder in done.stderr


def test_control_characters_of_a_name_reach_no_terminal_and_no_report(tmp_path: Path):
    run = write_run(tmp_path / "a\x1b[31mb", run={"name": "a\x1b]0;title\x07b"}, rows=steps(2))
    printed = [retool("runs", tmp_path), retool("watch", run), retool("report", run, "--out", tmp_path / "r.md")]
    for done in printed:
        assert done.exit_code == 0 and "\x1b" not in done.output and "\x07" not in done.output, done.output
    assert not {"\x1b", "\x07"} & set((tmp_path / "r.md").read_text())


def test_runs_lists_each_with_its_state_and_command(tmp_path: Path):
    shutil.copytree(QUICKSTART / "tool_rl", tmp_path / "a" / "tool_rl")
    write_run(tmp_path / "[red]half", run={"name": "half"}, rows=steps(4, accuracy=0.25, tokens_per_s=1234.0))
    write_run(tmp_path / "now", kind="sft", rows=steps(2))
    (write_run(tmp_path / "[i]torn", run={"name": "torn"}) / "metrics.jsonl").write_text("{\n")
    with lock_run(tmp_path / "now"):
        done = retool("runs", tmp_path)
    assert done.exit_code == 0
    cells = {}
    for line in done.stdout.splitlines():
        row = [cell for cell in re.split(r"\s{2,}", line) if cell]
        cells.setdefault(row[0], row)  # the commands follow
    assert cells["a/tool_rl"][1:3] == ["rl", "ended"] and cells["a/tool_rl"][4:6] == ["24/24", "0.938"]
    assert cells["[red]half"][2] == "killed" and cells["[red]half"][4:7] == ["4/10", "0.250", "1,234"]
    assert cells["now"][1:4] == ["sft", "running", "steps"] and cells["now"][7].endswith("left")
    assert cells["[i]torn"][2] == "damaged"
    assert f"[red]half  retool rl '{tmp_path}/[red]half/config.toml'" in done.stdout
    assert f"now        retool watch {tmp_path}/now" in done.stdout


def test_runs_are_a_line_each_on_a_terminal_of_80_columns():
    said = io.StringIO()
    table, _, _ = runs_table(QUICKSTART, find_runs(QUICKSTART))
    Console(width=80, file=said).print(table)
    lines = said.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["run", "sft", "text_rl", "tool_rl"]
    assert all("exported" in line and line.rstrip().endswith("ago") for line in lines[1:])


def test_runs_of_an_empty_or_missing_folder_is_one_error(tmp_path: Path):
    for root, words in ((tmp_path, "holds no runs"), (tmp_path / "nowhere", "is not a folder")):
        done = retool("runs", root)
        assert done.exit_code == 2 and words in done.stderr


def test_watch_prints_one_frame_where_it_is_asked_to():
    done = retool("watch", QUICKSTART / "tool_rl", "--once")
    assert done.exit_code == 0 and done.stdout.count("24 of 24") == 1
