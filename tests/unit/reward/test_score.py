"""The function verl calls."""

import pytest

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import Verdict
from retool_mcore.reward.score import compute_score
from retool_mcore.reward.statement import vote
from tests.unit.reward.slow import SLOW


def test_the_papers_reward_is_plus_or_minus_one():
    right = compute_score("math", r"\boxed{034}", "34", {"index": 0})
    assert right == {"score": 1.0, "acc": 1.0, "pred": "34", "extracted": "034", "has_answer": 1.0, "check_failed": 0.0}
    wrong = compute_score("math", r"\boxed{35}", "34", {"index": 0})
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "35", "extracted": "35", "has_answer": 1.0, "check_failed": 0.0}
    none = compute_score("math", "I give up", "34", None)
    assert none == {"score": -1.0, "acc": 0.0, "pred": "", "extracted": "", "has_answer": 0.0, "check_failed": 0.0}


def test_answers_that_are_written_differently_only_are_one_vote():
    preds = [
        compute_score("math", rf"\boxed{{{answer}}}", "7", None)["pred"] for answer in ("034", "34.0", "$34$", "34%")
    ]
    assert preds == ["34", "34", "34", "34%"]
    halves = (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", r"\left(\frac{1}{2}\right)")
    assert {compute_score("math", rf"\boxed{{{half}}}", "7", None)["pred"] for half in halves} == {"1/2"}
    roots = (r"\frac{\sqrt{2}}{2}", r"\dfrac{\sqrt 2}2", r"\frac{ \sqrt2 }{ 2 }")
    assert len({vote(root) for root in roots}) == 1
    assert len({vote(each) for each in (r"\frac{1}{23}x", r"\frac{12}{3}x", r"\sqrt{2}3", r"\sqrt{23}")}) == 4
    assert compute_score("math", r"\boxed{x+1}", "7", None)["pred"] == "x+1"


def test_the_values_come_from_the_configuration(monkeypatch: pytest.MonkeyPatch):
    assert compute_score("math", r"\boxed{1}", "1", None, reward=Reward(answer=[2.0, 0.5]))["score"] == 2.0
    assert compute_score("math", r"\boxed{2}", "1", None, reward=Reward(answer=[2.0, 0.5]))["score"] == 0.5
    limits: list[float] = []
    verdicts = [Verdict(False, how) for how in ("timeout", "crash", "too long", "values")]
    judged = iter(verdicts)
    judge = "retool_mcore.reward.response.judge"
    monkeypatch.setattr(judge, lambda *_, timeout_s: limits.append(timeout_s) or next(judged))
    made = [compute_score("math", r"\boxed{2}", "1", None, reward=Reward(timeout_s=0.5)) for _ in verdicts]
    assert [each["check_failed"] for each in made] == [1.0, 1.0, 0.0, 0.0]
    assert limits == [0.5] * 4


def test_the_agent_loops_answer_counts_and_a_data_column_of_that_name_does_not():
    ours = {"answer": "34", "behavior": {}}
    assert compute_score("math", r"\boxed{35}", "34", ours)["pred"] == "34"
    assert compute_score("math", r"\boxed{34}", "34", {"answer": None, "behavior": {}})["has_answer"] == 0.0
    assert compute_score("math", r"\boxed{35}", "34", {"answer": "34"})["pred"] == "35"


def test_a_check_that_hangs_is_wrong_and_counted():
    # The other way round than in test_answer.py, whose verdict a checker may remember.
    got = compute_score("math", rf"\boxed{{{SLOW[1]}}}", SLOW[0], None, reward=Reward(timeout_s=0.1))
    assert (got["score"], got["check_failed"]) == (-1.0, 1.0)


@pytest.mark.parametrize("truth", [None, "", "  ", True, ["34"]])
def test_a_row_without_truth_is_an_error_that_names_it(truth):
    with pytest.raises(RewardError, match="row 7 of data source 'math' has no usable truth: reward_model"):
        compute_score("math", r"\boxed{34}", truth, {"index": 7})
