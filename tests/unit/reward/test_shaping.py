"""Additions to the paper's reward: off by default, each a part of its own."""

import pytest

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.forms import equivalent
from retool_mcore.reward.score import compute_score, mean_parts
from retool_mcore.reward.simplified import simplified


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


def test_right_answers_get_no_bonus_for_calls():
    got = score("34", {"call_bonus": [0.1, -0.6]}, calls=3)
    assert (got["score"], got["reward_calls"]) == (1.0, 0.0)


@pytest.mark.parametrize("tokens, penalty", [(100, 0.0), (800, 0.0), (900, -0.5), (1000, -1.0), (1200, -1.0)])
def test_overlong_responses_lose_linearly_within_the_buffer(tokens, penalty):
    options = {"overlong_buffer_tokens": 200, "overlong_limit_tokens": 1000}
    got = score("34", options, response_tokens=tokens)
    assert got["reward_overlong"] == pytest.approx(penalty)
    assert got["score"] == pytest.approx(1.0 + penalty)
    assert got["acc"] == 1.0


def test_a_right_answer_with_a_malformed_call_is_gated_when_asked():
    got = score("34", {"require": ["format"]}, malformed={"json": 1})
    assert (got["score"], got["reward_answer"], got["format_ok"], got["acc"]) == (-1.0, -1.0, 0.0, 1.0)
    assert score("34", {"require": ["format"]})["score"] == 1.0
    assert score("34", malformed={"json": 1})["score"] == 1.0


@pytest.mark.parametrize(
    "answer, counts",
    [("34", True), ("34.0", True), (r"\frac{68}{2}", False), ("30+4", False), ("m+n = 30+4 = 34", True),
     (r"e^{\ln 34}", False), ("34+0x", False), (r"34\text{ cm}", True), ("3.4e1", True), ("68/2", False)],
)  # fmt: skip
def test_a_right_answer_that_is_not_worked_out_is_gated_when_asked(answer, counts):
    got = compute_score("math", rf"So \boxed{{{answer}}}.", "34", reward=Reward(require=["simplified"]))
    assert got["acc"] == 1.0
    assert (got["score"], got["simplified_ok"]) == ((1.0, 1.0) if counts else (-1.0, 0.0))
    assert compute_score("math", rf"So \boxed{{{answer}}}.", "34")["score"] == 1.0
    wrong = compute_score("math", r"\boxed{35}", "34", reward=Reward(require=["simplified"]))
    assert (wrong["score"], wrong["simplified_ok"]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    "answer, truth, worked_out",
    [
        ("0.5", r"\frac12", True),
        (r"\frac24", r"\frac12", True),
        (r"1\frac12", "1.5", True),
        (r"\frac{1}{4}+\frac{1}{4}", r"\frac12", False),
        (r"3\times10^{8}", "300000000", True),
        (r"\sqrt8", r"2\sqrt2", True),
        (r"\frac{4}{\sqrt2}", r"2\sqrt2", True),
        (r"\sqrt{\frac{1}{2}+\frac{3}{2}}\cdot\frac{12}{6}", r"2\sqrt2", False),
        ("(x+1)^2", "x^2+2x+1", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("(x+1)^2-(x-1)^2", "4x", False),
        ("4x", "4x", True),
        (r"\frac{-9}{4}", "-2.25", True),
        (r"\frac{\pi}{4}", r"45^\circ", True),
        (r"\sqrt2", "1.414214", True),
        ("y=4x", "y=4x", True),
        (r"\text{Evelyn}", "evelyn", True),
    ],
)
def test_what_counts_as_worked_out(answer, truth, worked_out):
    assert equivalent(answer, truth)
    assert simplified(answer, truth) == worked_out


def test_all_responses_of_a_run_have_the_same_parts():
    options = {
        "call_bonus": [0.1, -0.6],
        "overlong_buffer_tokens": 10,
        "overlong_limit_tokens": 100,
        "require": ["format"],
    }
    assert score("34", options).keys() == score("35", options, calls=2, response_tokens=95).keys()


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
