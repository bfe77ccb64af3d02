"""The time between two rows has a name, and what the engines say of their load is told over all of
them.
"""

import time

import numpy as np
import pytest

from retool_mcore.verl.rl_metrics import StepClock, load_metrics, row_of


def test_what_lies_between_two_rows_is_the_step_and_two_times_around_it():
    clock = StepClock()
    clock.row_written()
    first_s = time.perf_counter()
    time.sleep(0.02)  # verl's clean-up and console
    clock.step_begins()
    step_s = -time.perf_counter()
    time.sleep(0.03)
    step_s += time.perf_counter()
    clock.metrics_begin()
    time.sleep(0.01)
    times = clock.row_written()
    assert times["timing_s/between_steps"] >= 0.02 and times["timing_s/metrics"] >= 0.01
    assert sum(times.values()) + step_s == pytest.approx(time.perf_counter() - first_s, abs=0.005)


def test_the_load_is_over_polls_of_all_engines():
    assert load_metrics([(4, 0), (8, 6), (0, 3)]) == {
        "engine/running/mean": 4.0,
        "engine/queued/mean": 3.0,
    }
    assert load_metrics([]) == {}


def test_a_row_has_each_number_under_one_name():
    metrics = {"actor/grad_norm": 0.5, "actor/lr": 0.1, "note": "words"}
    scores = {"critic/score/mean": 1.0, "critic/rewards/mean": 1.0}
    lengths = {"response_length/mean": 7.0, "behavior/response_tokens": 7.0, "response_length/max": np.int64(9)}
    assert row_of(metrics | scores | lengths) == {
        "actor/grad_norm": 0.5,
        "actor/lr": 0.1,
        "critic/rewards/mean": 1.0,
        "response_length/mean": 7.0,
        "response_length/max": 9.0,
    }
    with_penalty = scores | {"critic/rewards/mean": 0.5}
    assert row_of(with_penalty) == with_penalty
    assert row_of({"behavior/response_tokens": 7.0}) == {"behavior/response_tokens": 7.0}
