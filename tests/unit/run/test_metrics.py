"""Metrics survive a kill, phases add up to the step, and a NaN never reaches a checkpoint."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.run import metrics, start
from retool_mcore.run.metric_table import METRICS, is_written
from retool_mcore.run.metrics import MetricWriter, NonFiniteLoss, PhaseTimer, read_metrics, require_finite, step_rates
from tests.unit.run.test_trackers import run_in


def test_phases_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1.0, 3.0, 3.0, 7.0, 15.0, 31.0, 63.0, 64.0])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = PhaseTimer()
    with timer.span("data"):
        pass
    with timer.span("forward_backward"), timer.span("optimizer"):
        pass
    times = {"data": 2.0, "forward_backward": 4.0 + 16.0, "optimizer": 8.0, "other": 1.0 + 32.0, "step": 63.0}
    assert timer.flush() == {f"timing_s/{name}": seconds for name, seconds in times.items()}
    assert timer.flush() == {"timing_s/other": 1.0, "timing_s/step": 1.0}


def test_the_rates_of_a_step_leave_out_its_checkpoint_and_its_validation():
    times = {"step": 20.0, "save_checkpoint": 9.0, "validate": 1.0}  # 10 s are left, 8 s of them in an update
    times |= {"data": 1.0, "forward_backward": 2.0, "optimizer": 5.0}
    platform: Any = SimpleNamespace(device=SimpleNamespace(peak_flops=100.0), gpu_percent=lambda: 62.5)
    of_step = {"perf/total_num_tokens": 400.0, "flops": 1600.0}
    rates = step_rates(of_step, {f"timing_s/{name}": seconds for name, seconds in times.items()}, platform, 4)
    expected = {"perf/total_num_tokens": 400.0, "tokens_per_s": 40.0, "perf/throughput": 10.0, "mfu": 0.5}
    assert rates == {**expected, "gpu_percent": 62.5}


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


def test_a_validation_has_its_own_row_and_a_reader_joins_it_with_its_steps(tmp_path: Path):
    for stage in ("checks", "steps"):
        start.begin(tmp_path, stage)
    writer = MetricWriter(run_in(tmp_path), resumed_step=0)
    writer.write(0, {"val/accuracy": 0.25})
    writer.write(1, {"accuracy": 0.5, "val/accuracy": 0.75, "val-core/math/acc/mean@2": 0.75, "best/step": 1.0})
    writer.write(2, {"accuracy": 0.625})
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = [set(row) - {"step", "unix_s"} for row in rows]
    validation = {"val/accuracy", "val-core/math/acc/mean@2", "best/step"}
    first = {"accuracy", "timing_s/start", "timing_s/start/checks"}  # the first step has the times of the start
    assert names == [{"val/accuracy"}, first, validation, {"accuracy"}]
    joined = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in joined] == [0, 1, 2]
    assert (joined[1]["accuracy"], joined[1]["val/accuracy"], "val/accuracy" in joined[2]) == (0.5, 0.75, False)
    MetricWriter(run_in(tmp_path), resumed_step=1).close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == rows[:3], "a resume keeps both rows of its step"
    MetricWriter(run_in(tmp_path), resumed_step=0).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [], "a run that starts over writes step 0 again, too"


def test_a_row_has_what_the_table_lists_and_what_a_user_adds():
    """Names of verl 0.9.1 that nothing reads are not written, a user's own are, in any family."""
    unread = ("actor/loss", "critic/returns/mean", "critic/rewards/max", "global_seqlen/min", "num_turns/mean",
              "perf/mfu/actor", "prompt_length/max", "response_length/clip_ratio", "rollout_corr/k3_kl",
              "timing_per_token_ms/gen", "training/epoch", "val-aux/math/reward/mean@2",
              "val-core/math/acc/best@2/std", "behavior/slowest_tool_s", "val/behavior/slowest_tool_s")  # fmt: skip
    users = ("reward/my_part", "mine/count", "actor/my_penalty", "behavior/calls/search", "val/reward/my_part")
    verls = ("actor/kl_loss", "timing_s/gen", "perf/throughput", "rollout_corr/kl", "critic/rewards/mean")
    assert [name for name in (*unread, *users, *verls) if is_written(name)] == [*users, *verls]
    assert all(is_written(name.replace("*", "x")) for names in METRICS.values() for name in names)


def test_nan_stops_the_run_and_names_itself():
    for name in ("loss", "grad_norm", "critic/vf_loss", "actor/pg_loss", "actor/grad_norm"):
        for value in (math.nan, math.inf):
            with pytest.raises(NonFiniteLoss, match=f"{name} = {value} at step 7"):
                require_finite({"loss": 1.0, "grad_norm": 1.0, name: value}, 7)
