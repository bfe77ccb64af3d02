"""Additions to the paper's reward: off by default, each logged as a separate part."""

from pathlib import Path

import pytest

from retool_mcore.config.rl import Reward
from retool_mcore.data.files import read_jsonl
from retool_mcore.errors import RewardError
from retool_mcore.reward.forms import equivalent
from retool_mcore.reward.score import compute_score, mean_parts
from retool_mcore.reward.simplified import simplified

SHAPED, SIMPLIFIED = (
    [row for _, row in read_jsonl(Path(__file__).with_name(f"{name}.jsonl"))] for name in ("shaping", "simplified")
)


def score(answer: str, reward: Reward, **behavior):
    counts = {"calls": 0, "response_tokens": 100, "malformed": {}, **behavior}
    info = {"answer": answer, "behavior": counts}
    return compute_score("math", "", "34", info, reward=reward, max_response_tokens=1000)


@pytest.mark.parametrize("case", SHAPED, ids=lambda case: case["name"])
def test_each_option_adds_its_part_to_the_score_and_keeps_the_verdict(case):
    plain, answer = score(case["answer"], Reward()), case["answer"]
    shaped = score(answer, Reward(**case["reward"]), **case["behavior"])
    assert shaped == pytest.approx(plain | case["parts"])
    assert shaped["acc"] == (0.0 if answer == "35" else 1.0)


def test_shaping_without_the_loops_counts_is_an_error():
    with pytest.raises(RewardError, match="needs the agent loop's counts"):
        compute_score("math", r"\boxed{34}", "34", {}, reward=Reward(call_bonus=[0.1, -0.6]))


def test_each_part_is_logged_by_its_mean():
    both = Reward(call_bonus=[0.1, -0.6], overlong_buffer_tokens=200)
    assert mean_parts([score("34", both, response_tokens=900), score("35", both, calls=2)]) == {
        "reward/has_answer": 1.0,
        "reward/check_failed": 0.0,
        "reward/answer": 0.0,
        "reward/calls": pytest.approx(0.1),
        "reward/overlong": -0.25,
    }


@pytest.mark.parametrize("case", SIMPLIFIED, ids=lambda case: f"{case['answer']} | {case['truth']}")
def test_what_counts_as_simplified(case):
    assert equivalent(case["answer"], case["truth"])
    assert simplified(case["answer"], case["truth"]) == case["simplified"]
