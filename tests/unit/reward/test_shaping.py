"""Additions to the paper's reward: off by default, each logged as a separate part."""

import json
from pathlib import Path

import pytest

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.forms import equivalent
from retool_mcore.reward.score import compute_score, mean_parts
from retool_mcore.reward.simplified import simplified

SIMPLIFIED = [json.loads(line) for line in Path(__file__).with_name("simplified.jsonl").read_text("utf-8").splitlines()]


def score(answer: str, shaping=None, **behavior):
    counts = {"calls": 0, "response_tokens": 100, "malformed": {}, **behavior}
    info = {"answer": answer, "behavior": counts}
    options = dict(shaping or {})
    limit = options.pop("overlong_limit_tokens", 0)
    return compute_score("math", "", "34", info, reward=Reward(**options), max_response_tokens=limit)


def test_by_default_nothing_is_added():
    parts = {"score": -1.0, "acc": 0.0, "pred": "35", "extracted": "35", "has_answer": 1.0, "check_failed": 0.0}
    assert score("35", calls=5) == parts
    assert score("35", {"call_bonus": [0.0, -0.6]}, calls=5)["score"] == -1.0


@pytest.mark.parametrize("calls, reward", [(0, -1.0), (1, -0.9), (3, -0.7), (4, -0.6), (7, -0.6)])
def test_the_recipes_bonus_for_calls_of_wrong_answers_ends_at_its_cap(calls, reward):
    got = score("35", {"call_bonus": [0.1, -0.6]}, calls=calls)
    assert got["score"] == pytest.approx(reward)
    assert got["reward_answer"] == -1.0
    assert got["reward_calls"] == pytest.approx(reward + 1)


@pytest.mark.parametrize("tokens, penalty", [(100, 0.0), (800, 0.0), (900, -0.5), (1000, -1.0), (1200, -1.0)])
def test_overlong_responses_lose_linearly_within_the_buffer(tokens, penalty):
    options = {"overlong_buffer_tokens": 200, "overlong_limit_tokens": 1000}
    got = score("34", options, response_tokens=tokens)
    assert got["reward_overlong"] == pytest.approx(penalty)
    assert got["score"] == pytest.approx(1.0 + penalty)
    assert got["acc"] == 1.0


def test_reward_require_format_needs_well_formed_calls():
    got = score("34", {"require": ["format"]}, malformed={"json": 1})
    assert (got["score"], got["reward_answer"], got["format_ok"], got["acc"]) == (-1.0, -1.0, 0.0, 1.0)
    assert score("34", {"require": ["format"]})["score"] == 1.0
    assert score("34", malformed={"json": 1})["score"] == 1.0


@pytest.mark.parametrize("answer, counts", [("34", True), ("30+4", False)])
def test_reward_require_simplified_needs_a_simplified_answer(answer, counts):
    got = compute_score("math", rf"So \boxed{{{answer}}}.", "34", reward=Reward(require=["simplified"]))
    assert got["acc"] == 1.0
    assert (got["score"], got["simplified_ok"]) == ((1.0, 1.0) if counts else (-1.0, 0.0))
    assert compute_score("math", rf"So \boxed{{{answer}}}.", "34")["score"] == 1.0
    wrong = compute_score("math", r"\boxed{35}", "34", reward=Reward(require=["simplified"]))
    assert (wrong["score"], wrong["simplified_ok"]) == (-1.0, 1.0)


def test_shaping_without_the_loops_counts_is_an_error():
    with pytest.raises(RewardError, match="needs the agent loop's counts"):
        compute_score("math", r"\boxed{34}", "34", {}, reward=Reward(call_bonus=[0.1, -0.6]))


def test_each_part_is_logged_by_its_mean():
    options = {"call_bonus": [0.1, -0.6], "overlong_buffer_tokens": 200, "overlong_limit_tokens": 1000}
    results = [score("34", options, response_tokens=900), score("35", options, calls=2)]
    assert mean_parts(results) == {
        "reward/has_answer": 1.0,
        "reward/check_failed": 0.0,
        "reward/answer": 0.0,
        "reward/calls": pytest.approx(0.1),
        "reward/overlong": -0.25,
    }
    assert set(mean_parts([score("34")])) == {"reward/has_answer", "reward/check_failed"}


@pytest.mark.parametrize("case", SIMPLIFIED, ids=lambda case: f"{case['answer']} | {case['truth']}")
def test_what_counts_as_simplified(case):
    assert equivalent(case["answer"], case["truth"])
    assert simplified(case["answer"], case["truth"]) == case["simplified"]
