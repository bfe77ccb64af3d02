"""Metrics survive a kill, phases add up to the step, and a NaN never reaches a checkpoint."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retool_mcore.run.metrics import (
    MetricWriter,
    NonFiniteLoss,
    PhaseTimer,
    memory_by_rank,
    read_metrics,
    require_finite,
    token_rates,
)
from tests.unit.run.test_trackers import run_in


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
    config = run_in(tmp_path)
    first = MetricWriter(config, resumed_step=0)
    for step in (1, 2, 3):
        first.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the kill
    second = MetricWriter(config, resumed_step=2)
    second.write(3, {"loss": 30.0})
    second.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    written_s = [row.pop("unix_s") for row in rows]
    assert written_s == sorted(written_s) and written_s[0] > time.time() - 600
    assert rows == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tokens_a_second_are_of_the_run_and_of_one_gpu():
    times = {"time_step_s": 10.0, "time_checkpoint_s": 1.5, "time_validate_s": 0.5, "time_other_s": 1.0}
    assert token_rates(800.0, times, 4) == {"tokens_per_s": 100.0, "tokens_per_s_per_gpu": 25.0}


def test_memory_is_told_by_rank_and_at_most():
    assert memory_by_rank([1.0, 3.0]) == {"memory_gib": 3.0, "memory_gib/rank_0": 1.0, "memory_gib/rank_1": 3.0}


@pytest.mark.parametrize("name", ["loss", "grad_norm", "critic/vf_loss"])
def test_nan_stops_the_run_and_names_itself(name: str):
    metrics = {"loss": 1.0, "grad_norm": 1.0, name: float("nan")}
    with pytest.raises(NonFiniteLoss, match=f"{name} = nan at step 7"):
        require_finite(metrics, 7)


def test_a_step_that_trains_the_critic_alone_has_no_loss_of_the_actor():
    require_finite({"critic/vf_loss": 1.0}, 7)
