"""Metrics of trajectories made by hand, where a reader can count the numbers."""

from dataclasses import replace
from typing import Any

import pytest

from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.loop import CallResult, Trajectory, Turn
from retool_mcore.rollout.metrics import Behavior, distributions, group_shares, summarize
from retool_mcore.rollout.tool_call import Parsed, code_calls


def result(code: str, *, ok: bool = True, status: str = "finished", cut_tokens: int = 0) -> CallResult:
    wall_s = 0.4 if status == "finished" else 5.0
    return CallResult(
        code=code, ok=ok, status=status, shown="1", cut_tokens=cut_tokens, run_s=0.1, queue_s=0.2, wall_s=wall_s
    )


def trajectory(*turns: tuple[Any, ...], stop: StopReason) -> Trajectory:
    """Model turns (parsed, tokens, results ...), and a tool turn of 5 tokens between any two."""
    made = Trajectory(ledger=Ledger([1, 2, 3], 1000), requests=len(turns) + 1)  # one was aborted
    for index, (parsed, tokens, *results) in enumerate(turns):
        if index:
            made.ledger.append_tool([9] * 5)
        start = len(made.ledger.response_ids)
        made.ledger.append_model([7] * tokens, [-1.0] * tokens)
        seconds = {"engine_s": 0.5, "tool_s": sum(each.wall_s for each in results)}
        turn = Turn(start=start, tokens=tokens, text="", parsed=parsed, answer=None, results=results, **seconds)
        made.turns.append(turn)
    made.ledger.close(stop)
    return made


CALL = Parsed(kind="tool_call", calls=code_calls("print(1)"))
REPAIRED = replace(CALL, repairs=("backslashes", "trailing_data"))
BAD = Parsed(kind="malformed", problem="json", error="no")
ANSWER = Parsed(kind="answer", answer="1")

# A failed call, a malformed one, the corrected call, an answer: 10 + 5 + 4 + 5 + 20 + 5 + 6 = 55
# tokens, 40 sampled.
CORRECTED = trajectory(
    (CALL, 10, result("x = 1\n\nprint(y)", ok=False, cut_tokens=4)),
    (BAD, 4),
    (REPAIRED, 20, result("print(1)", cut_tokens=3)),
    (ANSWER, 6),
    stop=StopReason.FINISHED,
)
PLAIN = trajectory((ANSWER, 10), stop=StopReason.FINISHED)
# The same failing code twice, stopped at a limit: 10 + 5 + 5 = 20 tokens.
STUBBORN = trajectory(
    (CALL, 10, result("loop()", ok=False, status="memory_limit", cut_tokens=2)),
    (CALL, 5, result("loop()", ok=False, status="time_limit")),
    stop=StopReason.TURNS,
)


def test_a_self_correction_is_a_failed_call_followed_by_other_code_that_runs():
    lucky = [result("a", ok=False), result(" a\n")]  # the same code
    twice = [result("a", ok=False), result("b"), result("c", ok=False), result("d")]
    for results, corrections in ((twice[:2], 1), (lucky, 0), (twice, 2)):
        made = trajectory(*((CALL, 3, each) for each in results), stop=StopReason.TURNS)
        assert Behavior.of(made).self_corrections == corrections


def test_the_metrics_of_a_batch():
    rows = [Behavior.of(each) for each in (CORRECTED, PLAIN, STUBBORN)]
    expected = {
        "code_ratio": 2 / 3,
        "calls": 4 / 3,
        "turns": 7 / 3,
        "requests": 10 / 3,
        "response_tokens": 85 / 3,
        "model_tokens": 65 / 3,
        "self_corrections": 1 / 3,
        "cut_tokens": 9 / 3,
        "engine_s": (2.0 + 0.5 + 1.0) / 3,
        "tool_s": (0.8 + 10.0) / 3,
        "slowest_s": 11.0,
        "slowest_tool_s": 10.0,
        "code_lines": 5 / 4,
        "executable_fraction": 1 / 4,
        "limit_fraction": 2 / 4,
        "cut_output_fraction": 3 / 4,
        "first_call_position": (10 / 55 + 10 / 20) / 2,
        "correct_code_fraction": 1 / 2,
        "stop/finished": 2 / 3,
        "stop/turns": 1 / 3,
        **dict.fromkeys(("stop/length", "stop/no_room", "stop/malformed_calls", "stop/tool_time"), 0.0),
        **dict.fromkeys(("malformed/json", "repaired/backslashes", "repaired/trailing_data"), 1 / 3),
    }
    metrics = summarize(rows, [True, True, False])
    assert metrics == pytest.approx({f"behavior/{name}": value for name, value in expected.items()})
    assert summarize(rows, [False, True, True])["behavior/correct_code_fraction"] == 0.0, "right, and by a call"
    assert (rows[2].call_s, rows[2].call_queue_s) == ([5.0, 5.0], [0.2, 0.2])
    of_calls = {"executable_fraction", "code_lines", "first_call_position", "correct_code_fraction", "limit_fraction"}
    alone = {name.removeprefix("behavior/") for name in summarize([rows[1]], [True])}
    assert "code_ratio" in alone and not alone & of_calls, "ratios of nothing are left out"
    assert summarize([]) == distributions([]) == {}


def test_percentiles_are_over_finished_responses_and_over_calls():
    plain = Behavior.of(PLAIN)
    rows = [replace(plain, response_tokens=length) for length in range(1, 101)]
    rows += [replace(plain, stop_reason="length", response_tokens=4096)] * 2
    rows += [replace(plain, stop_reason="turns", call_s=[0.1] * 18, call_queue_s=[0.0] * 18)]
    rows += [replace(plain, stop_reason="turns", call_s=[9.0, 1.0], call_queue_s=[4.0, 0.5])]
    rows[0] = replace(rows[0], context_tokens=300, cached_tokens=290)
    rows[1] = replace(rows[1], context_tokens=100, cached_tokens=0)
    assert distributions(rows) == {
        "length/finished/p50": 50,
        "length/finished/p99": 99,
        "tool/latency_s/p50": 0.1,
        "tool/latency_s/p99": 9.0,
        "tool/queue_s/p99": 4.0,
        "engine/cache_hit_rate": 290 / 400,
    }


@pytest.mark.parametrize(
    ("removed", "right", "wrong"),
    [
        ({}, 1 / 3, 1 / 3),
        # The filter put two right and four wrong groups aside, and one mixed group was not needed.
        ({"filtered": {1.0: 2, 0.0: 4}, "discarded": 1}, 3 / 10, 5 / 10),
    ],
)
def test_groups_are_counted_whole_and_before_the_filter(removed: dict[str, Any], right: float, wrong: float):
    uids, correct = ["a", "b", "c", "a", "b", "c"], [True, False, True, True, False, False]
    rewards = [1.0, -1.0, 1.0, 0.9, -1.0, -1.0]  # of "a" both answers are right, and one is longer
    expected = {"groups/all_right": right, "groups/all_wrong": wrong, "groups/same_reward": 1 / 3}
    assert group_shares(uids, correct, rewards, **removed) == pytest.approx(expected)
