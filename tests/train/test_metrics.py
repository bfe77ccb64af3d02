"""Metrics survive a kill, phases add up to the step, and a NaN never reaches a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from retool_mcore.train.metrics import MetricWriter, NonFiniteLoss, PhaseTimer, read_metrics, require_finite


def test_phases_add_up_to_the_step():
    timer = PhaseTimer()
    with timer.span("data"):
        time.sleep(0.01)
    with timer.span("forward_backward"):
        time.sleep(0.01)
        with timer.span("optimizer"):
            time.sleep(0.02)
        time.sleep(0.01)
    times = timer.flush()
    assert times["time_data_s"] >= 0.01 and times["time_optimizer_s"] >= 0.02
    assert 0.02 <= times["time_forward_backward_s"] < times["time_step_s"] - 0.03, "an inner span is taken out"
    parts = [value for name, value in times.items() if name != "time_step_s"]
    assert sum(parts) == pytest.approx(times["time_step_s"])


def test_a_resumed_run_rewrites_the_steps_after_its_checkpoint(tmp_path: Path):
    first = MetricWriter(tmp_path, resumed_step=0)
    for step in (1, 2, 3):
        first.write(step, {"loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the kill
    second = MetricWriter(tmp_path, resumed_step=2)
    second.write(3, {"loss": 30.0})
    second.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    written_s = [row.pop("unix_s") for row in rows]
    assert written_s == sorted(written_s) and written_s[0] > time.time() - 600
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_nan_stops_the_run_and_names_itself(name: str):
    metrics = {"loss": 1.0, "grad_norm": 1.0, name: float("nan")}
    with pytest.raises(NonFiniteLoss, match=f"{name} = nan at step 7"):
        require_finite(metrics, 7)
