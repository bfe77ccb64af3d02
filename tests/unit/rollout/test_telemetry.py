"""Distributions and shares of a step, on numbers that can be counted on fingers."""

import pytest

from retool_mcore.rollout.metrics import Behavior, distributions, group_shares


def behavior(stop_reason: str = "finished", response_tokens: int = 10, **more: object) -> Behavior:
    counts = {"turns": 1, "calls": 0, "calls_ok": 0, "calls_at_limit": 0, "last_call_ok": False, "code_lines": 0}
    counts |= {"first_call_tokens": None, "model_tokens": 1, "self_corrections": 0, "cut_outputs": 0, "cut_tokens": 0}
    counts |= {"engine_s": 0.0, "tool_s": 0.0, **more}
    return Behavior(stop_reason=stop_reason, response_tokens=response_tokens, **counts)  # pyright: ignore


def test_lengths_are_of_responses_that_ended_by_themselves():
    finished = [behavior(response_tokens=length) for length in range(1, 101)]
    cut = [behavior("length", 4096), behavior("length", 4090)]
    assert distributions([*cut, *finished]) == {"length/finished/p50": 50, "length/finished/p99": 99}
    assert distributions(cut) == {}


def test_the_time_of_calls_is_told_over_calls_and_not_over_trajectories():
    many = behavior(call_s=[0.1] * 18, call_queue_s=[0.0] * 18, call_run_s=[0.05] * 18)
    slow = behavior(call_s=[9.0, 1.0], call_queue_s=[4.0, 0.5], call_run_s=[2.0, 0.25])
    found = distributions([many, slow, behavior()])
    assert {name: value for name, value in found.items() if name.startswith("tool/")} == {
        "tool/latency_s/p50": 0.1,
        "tool/latency_s/p99": 9.0,
        "tool/queue_s/p99": 4.0,
    }


def test_the_cache_is_credited_by_tokens_and_only_where_the_engine_tells():
    rows = [behavior(context_tokens=300, cached_tokens=290), behavior(context_tokens=100, cached_tokens=0)]
    assert distributions(rows)["engine/cache_hit_rate"] == 290 / 400
    assert "engine/cache_hit_rate" not in distributions([behavior()])
    assert distributions([]) == {}


def test_groups_are_counted_whole_and_before_the_filter():
    uids, correct = ["a", "b", "c", "a", "b", "c"], [True, False, True, True, False, False]
    rewards = [1.0, -1.0, 1.0, 0.9, -1.0, -1.0]  # of "a" both answers are right, and one is longer
    shares = group_shares(uids, correct, rewards)
    assert shares == pytest.approx({"groups/all_right": 1 / 3, "groups/all_wrong": 1 / 3, "groups/same_reward": 1 / 3})
    # Of ten groups the filter put two right and four wrong ones aside, and one mixed one was not
    # needed.
    shares = group_shares(uids, correct, rewards, {1.0: 2, 0.0: 4}, discarded=1)
    assert shares == pytest.approx(
        {"groups/all_right": 3 / 10, "groups/all_wrong": 5 / 10, "groups/same_reward": 1 / 3}
    )
    assert group_shares([], [], []) == {}
