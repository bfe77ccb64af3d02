"""`retool watch`, `retool runs` and the alarms, as a user meets them."""

import io
import re
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, load_config
from retool_mcore.report.build import make_report
from retool_mcore.report.document import Pictures, Text
from retool_mcore.report.record import read_run, state_of
from retool_mcore.report.terminal import frame, runs_table, sparkline
from retool_mcore.report.warnings import warnings_of
from retool_mcore.run.alarms import alarms
from retool_mcore.run.folder import lock_run
from retool_mcore.run.progress import AlarmLines
from tests.unit.report.generated import NOW_S, QUICKSTART, steps, write_rows, write_run

TABLES = tomllib.loads(Path(__file__).with_name("alarms.toml").read_text(encoding="utf-8"))
ALARMS, METRICS = TABLES["alarm"], TABLES["metrics"]


def shown(path: Path) -> str:
    console, run = Console(file=io.StringIO(), width=110), read_run(path)
    console.print(frame(run, state_of(run), NOW_S))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def warned(path: Path, now_s: float = NOW_S + 1) -> list[str]:
    """The warnings of the run while it runs."""
    with lock_run(path):
        run = read_run(path)
        return warnings_of(run, state_of(run), now_s)


def test_a_frame_of_a_real_run_has_progress_and_the_last_metrics():
    text = shown(QUICKSTART / "tool_rl")
    assert "step 24 of 24, exported, checkpoint 24" in text and "no warnings" in text and "retool eval" in text
    (line,) = [line for line in text.splitlines() if " accuracy" in line and "validation" not in line]
    assert line.split()[-2] == "0.9375" and "▁▂▄▅▅▆▇▇██▇██▇█▇▇▆██▇▇██" in line
    assert "validation loss" in shown(QUICKSTART / "sft")
    assert (sparkline([0, 2, 7, 7, 3, 4], 3), sparkline([3, 3], 40)) == ("▁█▄", "▁▁")


def test_charts_and_frames_show_the_metric_that_they_name(tmp_path: Path):
    rows = steps(3)
    for row in rows:
        row |= {metric: row["step"] * (at + 0.25) for at, (metric, *_) in enumerate(METRICS)}
    run = write_run(tmp_path / "run", rows=rows)
    report, _ = make_report([read_run(run)])
    blocks = [block for section in report.sections for block in section.blocks if isinstance(block, Pictures)]
    charts = {picture.title: picture.svg for block in blocks for picture in block.pictures}
    lines = [line.strip("│ ") for line in shown(run).splitlines()]
    for at, (_, title, *labels) in enumerate(METRICS):
        value = f"{3 * (at + 0.25):.4g}"
        assert f"<title>run: {value} at step 3</title>" in charts[title]
        for label in labels:
            assert [line.split()[-1] for line in lines if re.match(rf"{label}  ", line)] == [value], label


def test_the_stages_of_a_start_are_shown_until_the_first_step_and_one_that_hangs_is_told(tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = [("checks", -30.0), ("ray", -20.0), ("engines", -15.0)]
    (run / "start.jsonl").write_text(
        "".join(f'{{"stage": "{s}", "unix_s": {NOW_S - 30}, "clock_s": {at}}}\n' for s, at in lines)
    )
    assert warned(run, NOW_S + 800) == []
    assert "the start has spent 16 min 55 s on one stage: starting the rollout engines" in warned(run, NOW_S + 1000)[0]
    with lock_run(run):
        text = shown(run)
        assert "10 s  checking settings" in text and "15 s  starting the rollout engines" in text
        write_rows(run, steps(1))
        assert "checking settings" not in shown(run)


def test_a_stalled_engine_is_told_against_the_usual_step(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(6, seconds=60.0))
    assert warned(run, NOW_S + 299) == []
    (warning,) = warned(run, NOW_S + 301)
    assert warning.startswith("no step for 5 min 1 s, but a step usually takes 1 min 0 s: an engine")
    fast = write_run(tmp_path / "fast", kind="sft", rows=steps(6, seconds=1.0))
    assert warned(fast, NOW_S + 119) == []
    assert warned(fast, NOW_S + 121)[0].endswith(f"1 s: a rank may be stuck. Look into {fast}/logs")
    killed = read_run(run)
    stopped = "the run is not running; it stopped after step 6; no checkpoint"
    assert warnings_of(killed, state_of(killed), NOW_S + 9999) == [stopped]


@pytest.mark.parametrize(
    "first, last, warns", [(1e-3, 4e-3, True), (1e-3, 2e-3, False), (1e-8, 1e-5, False), (1e-3, -4e-3, True)]
)
def test_a_rising_mismatch_is_told_where_it_matters(tmp_path: Path, first: float, last: float, warns: bool):
    rows = [{**row, "rollout_corr/kl": first if row["step"] <= 5 else last} for row in steps(10)]
    found = warned(write_run(tmp_path / "run", rows=rows, train={"steps": 20}))
    assert ("the engine drifts away from the actor" in "".join(found)) is warns


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm["what"])
def test_an_alarm_is_raised_from_the_first_step_on(tmp_path: Path, alarm: dict[str, Any]):
    rollout = {"max_response_tokens": 64}
    raised = write_run(tmp_path / "run", rows=steps(1, **alarm["raised"]), rollout=rollout)
    assert warned(raised) == [alarm["sentence"]]
    assert warned(write_run(tmp_path / "other", rows=steps(1, **alarm["quiet"]), rollout=rollout)) == []


def test_every_tool_shows_every_alarm(tmp_path: Path):
    [step] = steps(1, **{"actor/grad_norm": 0.0, "rollout_corr/kl": 0.2})
    validation = {"step": 1, "val/accuracy": 0.0, "unix_s": NOW_S}
    path = write_run(tmp_path / "run", rows=[step, validation], train={"steps": 1})
    run = read_run(path)
    sentences = list(alarms(run.rows, run.settings).values())
    assert len(sentences) == 3
    frame_of_watch = " ".join(shown(path).replace("│", " ").split())
    _, of_runs, _ = runs_table(tmp_path, [path])
    report, _ = make_report([run])
    [of_report] = [section for section in report.sections if section.title == "Warnings"]
    for each in sentences:
        assert each in frame_of_watch and ("run", each) in of_runs
        assert any(each in block.text for block in of_report.blocks if isinstance(block, Text))


def test_an_alarm_takes_the_mean_of_the_last_steps_and_one_of_the_newest_step_is_over_with_the_next(tmp_path: Path):
    shares = (0.0, 0.0, 0.9, 0.95, 0.95, 0.95, 1.0)
    rows = [{**row, "groups/same_reward": share} for row, share in zip(steps(7), shares, strict=True)]
    rows[5]["loss"] = float("nan")
    assert warned(write_run(tmp_path / "run", rows=rows)) == [
        "95% of the groups of the last 5 steps teach nothing: all rewards within a group are equal"
    ]
    rows[-1]["groups/same_reward"] = 0.7
    assert warned(write_run(tmp_path / "run", rows=rows)) == []


def test_without_tools_no_calls_are_no_alarm(tmp_path: Path):
    rows = steps(1, **{"behavior/code_ratio": 0.0})
    assert warned(write_run(tmp_path / "run", rows=rows, rollout={"tools": []})) == []


def test_the_terminal_of_a_run_gets_each_alarm_once():
    console = Console(file=io.StringIO(), width=200)
    config = load_config(RlConfig, Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml")
    lines = AlarmLines(console, config)
    lines.print(steps(1, grad_norm=0.0))
    lines.print(steps(2, grad_norm=0.0, **{"val/accuracy": 0.0}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "warning: grad_norm of step 1 is 0: nothing in the step's loss has a gradient",
        "warning: every answer of step 2's validation is wrong",
    ]


def retool(*argv: object) -> Result:
    return CliRunner().invoke(all_commands(), [str(each) for each in argv])


def test_a_name_is_no_markup_and_its_control_characters_reach_no_terminal_and_no_report(tmp_path: Path):
    name = "a\x1b]0;title\x07b [red]x[/red] [link=http://a]b[/link]"
    run = write_run(tmp_path / "a\x1b[31mb", run={"name": name}, rows=steps(2))
    assert "[red]x[/red] [link=http://a]b[/link]" in shown(run)
    printed = [retool("runs", tmp_path), retool("watch", run), retool("report", run, "--out", tmp_path / "r.md")]
    for done in printed:
        assert done.exit_code == 0 and "\x1b" not in done.output and "\x07" not in done.output, done.output
    assert not {"\x1b", "\x07"} & set((tmp_path / "r.md").read_text())


def test_runs_lists_each_with_its_state_and_command(tmp_path: Path):
    shutil.copytree(QUICKSTART / "tool_rl", tmp_path / "a" / "tool_rl")
    rows = steps(4, accuracy=0.25, tokens_per_s=1234.0)
    rows[-1] |= {"unix_s": time.time() - 150.0, "accuracy": 0.75, "tokens_per_s": 4321.0}
    write_run(tmp_path / "[red]half", run={"name": "half"}, rows=rows)
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
    assert cells["[red]half"][2] == "killed" and cells["[red]half"][4:7] == ["4/10", "0.750", "4,321"]
    assert cells["now"][1:4] == ["sft", "running", "steps"] and cells["now"][7].endswith("left")
    assert cells["[i]torn"][2] == "damaged" and cells["[red]half"][7].startswith("2 min 3")
    assert f"[red]half  retool rl '{tmp_path}/[red]half/config.toml'" in done.stdout
    assert f"now        retool watch {tmp_path}/now" in done.stdout
