"""The stages of a start, and the lines and the bar of the steps."""

import io
import json
import logging
import math
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore.cli import evaluate
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.cases import Case
from retool_mcore.run import progress, start, status
from retool_mcore.run.alarms import alarms
from retool_mcore.run.progress import StepLines
from tests.terminal import CONTROL

RL = Path(__file__).parents[3] / "configs" / "rl_tiny_cpu.toml"


def test_seconds_are_between_the_stages_whatever_is_done_to_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The clock is set back by an hour between the first two stages."""
    now, clock = iter([9000.0, 5403.5, 5410.0]), iter([100.0, 103.5, 110.0])
    monkeypatch.setattr(start.time, "time", lambda: next(now))
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    assert start.start_times(tmp_path) == {}
    for stage in ("checks", "ray", "steps"):
        start.begin(tmp_path, stage)
    assert start.start_times(tmp_path) == {
        "timing_s/start/checks": 3.5,
        "timing_s/start/ray": 6.5,
        "timing_s/start": 10.0,
    }


def test_early_stages_are_written_with_the_first_stage_after_the_lock(tmp_path: Path):
    start.begin(tmp_path, "update")  # an earlier start's
    for stage in ("checks", "settings", "processes"):  # "checks": of a command in this process before
        start.begin_early(stage)
    assert len(start.begun(tmp_path)) == 1, "another process may have the lock"
    for stage in ("processes", "data", "model"):
        start.begin(tmp_path, stage)
    names, times = zip(*start.begun(tmp_path), strict=True)
    assert names == ("settings", "processes", "data", "model")
    assert sorted(times) == list(times)
    assert not start.early_stages(), "a run that this process starts next has its own stages"


def test_another_start_overwrites_the_stages_and_a_truncated_line_is_ignored(tmp_path: Path):
    for stage in ("checks", "ray", "checks"):
        start.begin(tmp_path, stage)
    with open(tmp_path / "start.jsonl", "a") as file:
        file.write('{"stage": "r')
    assert [stage for stage, _ in start.begun(tmp_path)] == ["checks"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RlConfig:
    """A run with a row of an earlier start, which a faulty clock put into tomorrow."""
    monkeypatch.setattr(progress, "POLL_S", 0.02)
    loaded = load_config(RlConfig, RL, [f"run.root={tmp_path}", "train.steps=2"])
    loaded.run.dir.mkdir()
    add_row(loaded, 1, time.time() + 86400)
    return loaded


def add_row(config: RlConfig, step: int, unix_s: float) -> None:
    with open(config.run.dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "critic/rewards/mean": -0.5, "unix_s": unix_s}) + "\n")


def test_a_log_gets_a_line_for_each_stage_and_each_new_step(config: RlConfig):
    output = io.StringIO()
    with progress.progress(config, Console(file=output)):
        for stage in ("checks", "ray", "engines"):
            start.begin(config.run.dir, stage)
            time.sleep(0.2)
        add_row(config, 2, time.time())
        time.sleep(0.2)
    stages = [start.STAGES[stage] for stage in ("checks", "ray", "engines")]
    assert [line.split(" s  ")[-1] for line in output.getvalue().splitlines()] == [*stages, "step 2/2  reward -0.500"]
    seconds = [float(line.split(" s  ")[0]) for line in output.getvalue().splitlines()[:3]]
    assert seconds[0] == 0.0 and 0.2 <= seconds[1] < seconds[2], "since the first stage"


def test_a_start_that_fails_at_once_prints_no_line_for_its_newest_stage(config: RlConfig):
    output = io.StringIO()
    with pytest.raises(ConfigError), progress.progress(config, Console(file=output)):
        for stage in ("checks", "ray"):
            start.begin(config.run.dir, stage)
        raise ConfigError("a mistake")
    assert [line.split(" s  ")[1] for line in output.getvalue().splitlines()] == [start.STAGES["checks"]]


def test_a_long_run_of_sft_shows_new_steps_and_keeps_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "POLL_S", 0.02)
    config = load_config(SftConfig, RL.with_name("sft_tiny_cpu.toml"), [f"run.root={tmp_path}", "train.steps=3"])
    config.run.dir.mkdir()
    files: list[progress.MetricsFile] = []
    read = progress.MetricsFile.read
    monkeypatch.setattr(progress.MetricsFile, "read", lambda file: (files.append(file), read(file))[1])
    output = io.StringIO()
    with progress.progress(config, Console(file=output)), open(config.run.dir / "metrics.jsonl", "w") as file:
        for step in (1, 2, 3):
            file.write(
                json.dumps({"step": step, "loss": step / 2, "grad_norm": step - 2.0, "unix_s": time.time()}) + "\n"
            )
            file.flush()
            time.sleep(0.2)
    assert output.getvalue().splitlines() == [
        "step 1/3  loss 0.5000",
        "warning: grad_norm of step 2 is 0: nothing in the step's loss has a gradient",
        "step 3/3  loss 1.5000",
    ]
    assert [row["step"] for row in files[-1].rows] == [3]


def on_terminal(config: RlConfig, *, step: bool) -> str:
    """What a terminal gets from a start that makes a step, or none."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with progress.progress(config, console):
        start.begin(config.run.dir, "checks")
        status.print_text(console, "note: of the start")
        if step:
            add_row(config, 2, 7.0)
    return output.getvalue()


def test_the_bar_stays_only_after_a_step_and_notes_have_separate_lines(config: RlConfig):
    erased = "\r\x1b[1A\x1b[2K"
    without = on_terminal(config, step=False)
    assert without.endswith(erased)
    lines = re.split(r"[\r\n]+", CONTROL.sub("", without))
    assert "note: of the start" in lines and not any("note" in line and "rl" in line for line in lines)
    stays = on_terminal(config, step=True)
    assert not stays.endswith(erased) and re.search(r"rl  reward -0\.500 .* 2/2", CONTROL.sub("", stays))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_steps_line_has_its_metrics_and_the_time_left(clock: list[float]):
    output = io.StringIO()
    lines = StepLines(Console(file=output), 10)
    lines.print(
        {"step": 3, "critic/rewards/mean": -0.25, "accuracy": 0.375, "tokens_per_s": 5120.4, "timing_s/step": 12.34}
    )
    clock[0] += 30
    lines.print({"step": 4, "critic/rewards/mean": 0.5, "accuracy": 0.75, "val/accuracy": 0.5})
    clock[0] += 30
    lines.print({"step": 9, "loss": 1.0})
    assert output.getvalue().splitlines() == [
        "step 3/10  reward -0.250  accuracy 0.375  5,120 tokens/s  12.3 s",
        "step 4/10  reward +0.500  accuracy 0.750  val/accuracy 0.500  3.0 min left",
        "step 9/10  loss 1.0000  10 s left",
    ]


def test_there_is_at_most_one_line_a_second_and_always_one_for_the_last_step(clock: list[float]):
    output = io.StringIO()
    lines = StepLines(Console(file=output), 6)
    for step in range(1, 7):
        lines.print({"step": step, "loss": 1.0})
        clock[0] += 0.4
    assert [line.split("/")[0] for line in output.getvalue().splitlines()] == ["step 1", "step 4", "step 6"]


def test_an_evaluation_prints_warnings_above_its_bars_and_lines_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(evaluate, "LINE_EVERY_S", 0.0)
    with evaluate._Bars([Case(name="mine", model="m")]) as bars:  # pyright: ignore[reportPrivateUsage]
        bars.start("mine", 1, 3)
        logging.getLogger("retool_mcore.sandbox.supervisor.local").warning("Python lies under /tmp")
        bars.advance("mine", True)
        bars.advance("mine", False)
    printed = capfd.readouterr()
    assert printed.out == "note: Python lies under /tmp\n"
    assert printed.err == "mine: 1 sampled, 1 left, 1.000 right\nmine: 2 sampled, 0 left, 0.500 right\n"


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        ([{"val/accuracy": 0.0}], "every answer of step 0's validation is wrong"),
        ([{}, {"critic/rewards/mean": math.nan, "loss": math.inf}], "loss and critic/rewards/mean of step 1 are not"),
        ([{}, {"behavior/stop/no_room": 0.2, "behavior/stop/length": 0.1}], "30% of the responses of step 1 were cut"),
        ([{}, {"rollout_corr/kl": -0.06}], "engine and actor disagree: rollout_corr/kl is 0.06 nats, above 0.05"),
        ([{"rollout_corr/kl": 1e-3}] * 11 + [{"rollout_corr/kl": 9.0}], ""),  # one step alone
        ([{}, {"behavior/malformed/json": 10.0}] + [{"behavior/malformed/json": 3.0, "behavior/calls": 10.0}] * 5, ""),
    ],
)
def test_what_the_last_steps_have_in_common_is_an_alarm(rows: list[dict[str, float]], begins: str):
    numbered = [{"step": float(step), **row} for step, row in enumerate(rows)]
    found = alarms(numbered, {"rollout": {"tools": ["code_interpreter"], "max_response_tokens": 160}})
    assert [sentence[: len(begins)] for sentence in found.values()] == ([begins] if begins else [])
