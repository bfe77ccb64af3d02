"""What `retool watch` shows, and what it warns of."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from retool_mcore.config import RlConfig, load_config
from retool_mcore.report.build import make_report
from retool_mcore.report.document import Text
from retool_mcore.report.record import read_run
from retool_mcore.report.state import state_of
from retool_mcore.report.table import runs_table
from retool_mcore.report.warnings import AlarmLines, alarms, warnings_of
from retool_mcore.report.watch import frame, watch
from retool_mcore.run.folder import lock_run
from tests.unit.report.generated import NOW_S, QUICKSTART, steps, write_rows, write_run


def shown(path: Path, now_s: float = NOW_S) -> str:
    console = Console(file=io.StringIO(), width=110)
    run = read_run(path)
    console.print(frame(run, state_of(run), now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def warned(path: Path, now_s: float = NOW_S + 1, *, running: bool = True) -> list[str]:
    if running:
        with lock_run(path):
            run = read_run(path)
            return warnings_of(run, state_of(run), now_s)
    run = read_run(path)
    return warnings_of(run, state_of(run), now_s)


def test_a_frame_of_a_real_run_has_progress_and_the_last_metrics():
    text = shown(QUICKSTART / "tool_rl")
    assert "step 24 of 24, exported, checkpoint 24" in text and "no warnings" in text
    (line,) = [line for line in text.splitlines() if " accuracy" in line and "validation" not in line]
    assert line.split()[-2] == "0.9375" and "▁▂▄▅▅▆▇▇██▇██▇█▇▇▆██▇▇██" in line
    assert "retool eval" in text
    text = shown(QUICKSTART / "sft")
    assert "validation loss" in text and "reward" not in text


def test_a_running_one_has_its_time_left_and_no_command(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(4, seconds=600.0))
    with lock_run(run):
        text = shown(run)
    assert "step 4 of 10, steps, 1 h 0 min left" in text and "go on" not in text


def test_the_stages_of_a_start_are_shown_until_the_first_step(tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = [("checks", -30.0), ("ray", -20.0), ("engines", -15.0)]
    (run / "start.jsonl").write_text(
        "".join(f'{{"stage": "{s}", "unix_s": {NOW_S - 30}, "clock_s": {at}}}\n' for s, at in lines)
    )
    with lock_run(run):
        text = shown(run)
        assert "10 s  checking settings" in text and "15 s  starting the rollout engines" in text
        write_rows(run, steps(1))
        assert "checking settings" not in shown(run)


def test_a_stalled_engine_is_told_against_the_usual_step(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(6, seconds=60.0))
    assert warned(run, NOW_S + 299) == []
    (warning,) = warned(run, NOW_S + 301)
    assert warning.startswith("no step for 5 min 1 s, and one usually takes 1 min 0 s: an engine")
    fast = write_run(tmp_path / "fast", rows=steps(6, seconds=1.0))
    assert warned(fast, NOW_S + 100) == [] and len(warned(fast, NOW_S + 121)) == 1
    assert "no step for" not in "".join(warned(run, NOW_S + 9999, running=False))


def test_a_start_that_hangs_is_told(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "start.jsonl").write_text(f'{{"stage": "engines", "unix_s": {NOW_S}, "clock_s": 0}}\n')
    assert warned(run, NOW_S + 800) == []
    assert "the start has been starting the rollout engines for 16 min 40 s" in warned(run, NOW_S + 1000)[0]


def rising(first: float, last: float) -> list[dict[str, Any]]:
    return [{**row, "rollout_corr/kl": first if row["step"] <= 5 else last} for row in steps(10)]


@pytest.mark.parametrize(
    "first, last, warns", [(1e-3, 4e-3, True), (1e-3, 2e-3, False), (1e-8, 1e-5, False), (1e-3, -4e-3, True)]
)
def test_a_rising_mismatch_is_told_where_it_matters(tmp_path: Path, first: float, last: float, warns: bool):
    found = warned(write_run(tmp_path / "run", rows=rising(first, last), train={"steps": 20}))
    assert ("the engine drifts from the actor" in "".join(found)) is warns


def test_a_mismatch_that_is_there_from_the_first_step_is_told(tmp_path: Path):
    for kl, warns in ((-0.06, True), (0.04, False)):
        rows = [{**row, "rollout_corr/kl": kl} for row in steps(1)]
        found = warned(write_run(tmp_path / f"run{kl}", rows=rows, train={"steps": 20}))
        assert ("engine and actor disagree: rollout_corr/kl is" in "".join(found)) is warns


NEWEST = {
    "loss is not finite": ({"loss": float("nan")}, "loss of step 6 is not finite"),
    "outages": ({"rollout/dropped": 3.0}, "outages dropped 3 trajectories in step 6"),
    "answers not judged": ({"reward/check_failed": 0.02}, "2.0% of step 6's answers could not be checked"),
}


@pytest.mark.parametrize("case", NEWEST)
def test_what_is_wrong_with_the_newest_step_is_told(tmp_path: Path, case: str):
    metrics, words = NEWEST[case]
    rows = steps(6)
    rows[-1] |= metrics
    assert warned(write_run(tmp_path / "run", rows=rows)) == [words]
    rows.append({"step": 7, "unix_s": NOW_S})
    assert warned(write_run(tmp_path / "run", rows=rows)) == []


ALARMS = {  # metrics of the only step, the sentence, and metrics that raise no alarm
    "no gradient": ({"grad_norm": 0.0}, "grad_norm of step 1 is 0: the step has changed no weight", {"grad_norm": 0.1}),
    "no gradient in RL": (
        {"actor/grad_norm": 0.0},
        "grad_norm of step 1 is 0: the step has changed no weight",
        {"actor/grad_norm": 0.1},
    ),
    "groups": (
        {"groups/same_reward": 0.95},
        "95% of the groups of step 1 teach nothing: all their trajectories have the same reward",
        {"groups/same_reward": 0.85, "groups/all_wrong": 1.0},
    ),
    "validation": (
        {"val/accuracy": 0.0},
        "every answer of step 1's validation is wrong",
        {"val/accuracy": 0.01},
    ),
    "malformed": (
        {"behavior/malformed/no_fence": 0.4, "behavior/malformed/json": 0.1, "behavior/calls": 1.0},
        "33% of the calls of step 1 could not be read: look at behavior/malformed/*, and check that "
        "rollout.protocol is the model's",
        {"behavior/malformed/no_fence": 0.3, "behavior/calls": 1.0},
    ),
    "no calls": (
        {"behavior/code_ratio": 0.0},
        "no trajectory of step 1 called a tool, and rollout.tools offers code_interpreter",
        {"behavior/code_ratio": 0.01},
    ),
    "cut": (
        {"behavior/stop/length": 0.3},
        "30% of the responses of step 1 were cut at rollout.max_response_tokens = 64",
        {"behavior/stop/length": 0.2},
    ),
}


@pytest.mark.parametrize("case", ALARMS)
def test_an_alarm_is_raised_from_the_first_step_on(tmp_path: Path, case: str):
    raised, sentence, quiet = ALARMS[case]
    rollout = {"max_response_tokens": 64}
    assert warned(write_run(tmp_path / "run", rows=steps(1, **raised), rollout=rollout)) == [sentence]
    assert warned(write_run(tmp_path / "other", rows=steps(1, **quiet), rollout=rollout)) == []


def test_a_run_that_learns_nothing_is_called_failing_by_every_tool(tmp_path: Path):
    """A report said "no warnings" of such a run: accuracy 0, and 56 % of its calls malformed."""
    training = {"accuracy": 0.0, "actor/grad_norm": 0.0, "groups/same_reward": 1.0, "groups/all_wrong": 1.0}
    training |= {"behavior/malformed/tags": 0.56, "behavior/calls": 0.44, "behavior/code_ratio": 0.44}
    training |= {"behavior/stop/length": 0.69, "rollout_corr/kl": 0.2}
    [step] = steps(1, **training)
    validation = {"step": 1, "val/accuracy": 0.0, "unix_s": NOW_S}
    path = write_run(tmp_path / "run", rows=[step, validation], train={"steps": 1})
    run = read_run(path)
    sentences = list(alarms(run.rows, run.settings).values())
    starts = ("grad_norm of step 1 is 0", "every answer", "100% of the groups", "56% of the calls", "69% of the resp",
              "engine and actor disagree")  # fmt: skip
    assert [any(each.startswith(start) for each in sentences) for start in starts] == [True] * len(starts) == [True] * 6
    frame_of_watch = " ".join(shown(path).replace("│", " ").split())
    _, of_runs, _ = runs_table(tmp_path, [path])
    report, _ = make_report([run])
    [of_report] = [section for section in report.sections if section.title == "Warnings"]
    console = Console(file=io.StringIO(), width=400)
    AlarmLines(console, load_config(RlConfig, Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml")).tell(run.rows)
    assert isinstance(console.file, io.StringIO)
    for each in sentences:
        assert each in frame_of_watch and ("run", each) in of_runs
        assert any(each in block.text for block in of_report.blocks if isinstance(block, Text))
        assert f"warning: {each[:40]}" in console.file.getvalue()


def test_an_alarm_takes_the_mean_of_the_last_steps(tmp_path: Path):
    shares = (0.0, 0.0, 0.9, 0.95, 0.95, 0.95, 1.0)
    rows = [{**row, "groups/same_reward": share} for row, share in zip(steps(7), shares, strict=True)]
    assert warned(write_run(tmp_path / "run", rows=rows)) == [
        "95% of the groups of the last 5 steps teach nothing: all their trajectories have the same reward"
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
    lines.tell(steps(1, grad_norm=0.0))
    lines.tell(steps(2, grad_norm=0.0, **{"val/accuracy": 0.0}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "warning: grad_norm of step 1 is 0: the step has changed no weight",
        "warning: every answer of step 2's validation is wrong",
    ]


def test_a_killed_run_says_so_first(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(6))
    assert warned(run, running=False)[0] == "not running, stopped after step 6; no checkpoint"
    assert "go on: retool rl " in shown(run)


def test_names_of_runs_are_no_markup_of_the_terminal(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(2), run={"name": "[red]x[/red] [link=http://a]b[/link]"})
    assert "[red]x[/red] [link=http://a]b[/link]" in shown(run)


def test_an_output_that_is_no_terminal_gets_one_frame(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(2))
    with lock_run(run):  # it runs on, and the watch does not
        out = io.StringIO()
        watch(run, Console(file=out, width=110), once=False)
    assert out.getvalue().count("step 2 of 10") == 1
