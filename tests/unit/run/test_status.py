"""The stages of a start, the lines of the steps, and alarms."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore.run import progress, start
from retool_mcore.run.alarms import alarms
from retool_mcore.run.progress import StepLines


def test_seconds_are_between_the_stages_whatever_is_done_to_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The clock is set back by an hour between the first two stages."""
    now, clock = iter([9000.0, 5403.5, 5410.0]), iter([100.0, 103.5, 110.0])
    monkeypatch.setattr(start.time, "time", lambda: next(now))
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    assert start.start_times(tmp_path) == {}
    for stage in ("checks", "ray", "steps"):
        start.begin(tmp_path, stage)
    with open(tmp_path / "start.jsonl", "a") as file:
        file.write('{"stage": "r')  # it is being written
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


def test_a_steps_line_has_its_metrics_and_the_time_left_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    output = io.StringIO()
    lines = StepLines(Console(file=output), 10)
    reward = "critic/rewards/mean"
    first = {"step": 3, reward: -0.25, "accuracy": 0.375, "tokens_per_s": 5120.4, "timing_s/step": 12.34}
    later = {"step": 5, reward: 0.5, "accuracy": 0.75, "val/accuracy": 0.5}
    for wait_s, row in (
        (0, first),
        (0.4, {"step": 4, "loss": 1.0}),
        (59.6, later),
        (60, {"step": 9, "loss": 1.0}),
        (0.4, {"step": 10, "loss": 2.0}),
    ):
        now[0] += wait_s
        lines.print(row)
    assert output.getvalue().splitlines() == [
        "step 3/10  reward -0.250  accuracy 0.375  5,120 tokens/s  12.3 s",
        "step 5/10  reward +0.500  accuracy 0.750  val/accuracy 0.500  2.5 min left",
        "step 9/10  loss 1.0000  20 s left",
        "step 10/10  loss 2.0000",
    ]


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        ([{"behavior/stop/no_room": 0.2, "behavior/stop/length": 0.1}], "30% of the responses of step 1 were cut"),
        ([{"rollout_corr/kl": -0.06}], "engine and actor disagree: rollout_corr/kl is 0.06 nats, above 0.05"),
        ([{"rollout_corr/kl": 1e-3}] * 11 + [{"rollout_corr/kl": 9.0}], ""),  # one step alone
        ([{"behavior/malformed/json": 10.0}] + [{"behavior/malformed/json": 3.0, "behavior/calls": 10.0}] * 5, ""),
    ],
)
def test_what_the_last_steps_have_in_common_is_an_alarm(rows: list[dict[str, float]], begins: str):
    numbered = [{"step": float(step), **row} for step, row in enumerate(rows, start=1)]
    found = alarms(numbered, {"rollout": {"tools": ["code_interpreter"], "max_response_tokens": 160}})
    assert [sentence[: len(begins)] for sentence in found.values()] == ([begins] if begins else [])
