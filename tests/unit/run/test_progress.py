"""What a run says of its steps where there is no terminal."""

import io
import logging
import re

import pytest
from rich.console import Console

from retool_mcore.cli import evaluate
from retool_mcore.evaluate.cases import Case
from retool_mcore.run import progress
from retool_mcore.run.progress import StepLines, bar_of_steps
from tests.terminal import CONTROL


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_each_step_is_a_line_with_what_it_has_and_the_time_left(clock: list[float]):
    said = io.StringIO()
    lines = StepLines(Console(file=said), 10)
    lines.tell(
        {"step": 3, "critic/rewards/mean": -0.25, "accuracy": 0.375, "tokens_per_s": 5120.4, "timing_s/step": 12.34}
    )
    clock[0] += 30
    lines.tell({"step": 4, "critic/rewards/mean": 0.5, "accuracy": 0.75, "val/accuracy": 0.5})
    assert said.getvalue().splitlines() == [
        "step 3/10  reward -0.250  accuracy 0.375  5,120 tokens/s  12.3 s",
        "step 4/10  reward +0.500  accuracy 0.750  val/accuracy 0.500  3.0 min left",
    ]


def test_there_is_one_line_a_second_at_most_and_the_last_step_is_always_told(clock: list[float]):
    said = io.StringIO()
    lines = StepLines(Console(file=said), 6)
    for step in range(1, 7):
        lines.tell({"step": step, "loss": 1.0})
        clock[0] += 0.4
    assert [line.split("/")[0] for line in said.getvalue().splitlines()] == ["step 1", "step 4", "step 6"]


def test_a_terminal_has_a_bar_and_no_lines(clock: list[float]):
    said = io.StringIO()
    StepLines(Console(file=said, force_terminal=True), 6).tell({"step": 1, "loss": 1.0})
    assert not said.getvalue()


def test_less_than_a_minute_is_told_in_seconds(clock: list[float]):
    said = io.StringIO()
    lines = StepLines(Console(file=said), 4)
    for step in (1, 2, 3):
        lines.tell({"step": step, "loss": 1.0})
        clock[0] += 31
    assert [line.rpartition("  ")[2] for line in said.getvalue().splitlines()[1:]] == ["1.0 min left", "31 s left"]


def test_a_log_gets_no_bar_and_no_empty_line():
    said = io.StringIO()
    with bar_of_steps(Console(file=said)) as bars:
        bars.update(bars.add_task("sft", total=4), completed=4)
    assert not said.getvalue()


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_cuts_the_bar_and_no_number(width: int):
    said = io.StringIO()
    with bar_of_steps(Console(file=said, force_terminal=True, width=width, color_system=None)) as bars:
        bars.update(bars.add_task("sft  loss 0.0833", total=1200), completed=1200)
    last = [line for line in re.split(r"[\r\n]+", CONTROL.sub("", said.getvalue())) if line][-1]
    assert last.startswith("sft  loss 0.0833 ━") and last.endswith("━ 1200/1200 0:00:00")
    assert len(last) == width


def test_an_evaluation_has_warnings_above_its_bars_and_lines_in_a_log(monkeypatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(evaluate, "LINE_EVERY_S", 0.0)
    with evaluate._Bars([Case(name="mine", model="m")]) as bars:
        bars.start("mine", 1, 3)
        logging.getLogger("retool_mcore.sandbox.supervisor.local").warning("Python lies under /tmp")
        bars.advance("mine", True)
        bars.advance("mine", False)
    told = capfd.readouterr()
    assert told.out == "note: Python lies under /tmp\n"
    assert told.err == "mine: 1 sampled, 1 left, 1.000 right\nmine: 2 sampled, 0 left, 0.500 right\n"
