"""Metrics of trajectories made by hand, where a reader can count the numbers."""

import pytest

from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.loop import CallResult, Trajectory, Turn
from retool_mcore.rollout.metrics import Behavior, distributions, group_shares, summarize
from retool_mcore.rollout.tool_call import Parsed, code_calls


def result(code: str, *, ok: bool = True, status: str = "finished", cut_tokens: int = 0) -> CallResult:
    return CallResult(
        code=code, ok=ok, status=status, shown="1", cut_tokens=cut_tokens, run_s=0.1, queue_s=0.2, wall_s=0.4
    )


def model_turn(
    parsed: Parsed | None, tokens: int, *results: CallResult
) -> tuple[Parsed | None, int, tuple[CallResult, ...]]:
    return parsed, tokens, results


def trajectory(*turns: tuple[Parsed | None, int, tuple[CallResult, ...]], stop: StopReason) -> Trajectory:
    """Model turns of the given lengths, a tool turn of 5 tokens between any two."""
    made = Trajectory(ledger=Ledger([1, 2, 3], 1000), requests=len(turns) + 1)  # one was aborted
    for index, (parsed, tokens, results) in enumerate(turns):
        if index:
            made.ledger.append_tool([9] * 5)
        start = len(made.ledger.response_ids)
        made.ledger.append_model([7] * tokens, [-1.0] * tokens)
        made.turns.append(
            Turn(start=start, tokens=tokens, text="", parsed=parsed, answer=None, results=list(results), engine_s=0.5)
        )
    made.ledger.close(stop)
    return made


CALL = Parsed(kind="tool_call", calls=code_calls("print(1)"))
REPAIRED = Parsed(kind="tool_call", calls=code_calls("print(1)"), repairs=("backslashes", "trailing_data"))
BAD = Parsed(kind="malformed", problem="json", error="no")
ANSWER = Parsed(kind="answer", answer="1")

# A failed call, a malformed one, the corrected call, an answer: 10 + 5 + 4 + 5 + 20 + 5 + 6 = 55
# tokens, 40 sampled.
CORRECTED = trajectory(
    model_turn(CALL, 10, result("x = 1\n\nprint(y)", ok=False)),
    model_turn(BAD, 4),
    model_turn(REPAIRED, 20, result("print(1)", cut_tokens=3)),
    model_turn(ANSWER, 6),
    stop=StopReason.FINISHED,
)
# An answer without code: 10 tokens.
PLAIN = trajectory(model_turn(ANSWER, 10), stop=StopReason.FINISHED)
# The same failing code twice, the second stopped at the time limit, and the turns are used up: 10 +
# 5 + 5 = 20 tokens.
STUBBORN = trajectory(
    model_turn(CALL, 10, result("loop()", ok=False)),
    model_turn(CALL, 5, result("loop()", ok=False, status="time_limit")),
    stop=StopReason.TURNS,
)


def test_counts_of_one_trajectory():
    assert Behavior.of(CORRECTED) == Behavior(
        stop_reason="finished",
        turns=4,
        calls=2,
        calls_ok=1,
        calls_at_limit=0,
        last_call_ok=True,
        code_lines=3,
        first_call_tokens=10,
        response_tokens=55,
        model_tokens=40,
        self_corrections=1,
        cut_outputs=1,
        cut_tokens=3,
        engine_s=2.0,
        tool_s=0.0,
        malformed={"json": 1},
        repairs={"backslashes": 1, "trailing_data": 1},
        call_s=[0.4, 0.4],
        call_queue_s=[0.2, 0.2],
        requests=5,
        context_tokens=0,
        cached_tokens=0,
    )


@pytest.mark.parametrize(
    ("results", "corrections"),
    [
        ([result("a", ok=False), result("b")], 1),
        ([result("a", ok=False), result(" a\n")], 0),  # the same code ran the second time: luck, not correction
        ([result("a", ok=False), result("b", ok=False), result("c")], 1),
        ([result("a", ok=False), result("b"), result("c", ok=False), result("d")], 2),
    ],
)
def test_a_self_correction_is_a_failed_call_followed_by_other_code_that_runs(
    results: list[CallResult], corrections: int
):
    made = trajectory(*(model_turn(CALL, 3, each) for each in results), stop=StopReason.TURNS)
    assert Behavior.of(made).self_corrections == corrections


def test_the_metrics_of_a_batch():
    metrics = summarize([Behavior.of(each) for each in (CORRECTED, PLAIN, STUBBORN)], [True, True, False])
    assert metrics == pytest.approx(
        {
            "behavior/code_ratio": 2 / 3,
            "behavior/calls": 4 / 3,
            "behavior/turns": 7 / 3,
            "behavior/requests": 10 / 3,
            "behavior/response_tokens": 85 / 3,
            "behavior/model_tokens": 65 / 3,
            "behavior/self_corrections": 1 / 3,
            "behavior/cut_tokens": 1.0,
            "behavior/engine_s": (2.0 + 0.5 + 1.0) / 3,
            "behavior/tool_s": 0.0,
            "behavior/slowest_s": 2.0,
            "behavior/slowest_tool_s": 0.0,
            "behavior/code_lines": 5 / 4,
            "behavior/executable_fraction": 1 / 4,
            "behavior/limit_fraction": 1 / 4,
            "behavior/cut_output_fraction": 1 / 4,
            "behavior/first_call_position": (10 / 55 + 10 / 20) / 2,
            "behavior/correct_code_fraction": 1 / 2,
            "behavior/stop/finished": 2 / 3,
            "behavior/stop/length": 0.0,
            "behavior/stop/no_room": 0.0,
            "behavior/stop/turns": 1 / 3,
            "behavior/stop/malformed_calls": 0.0,
            "behavior/stop/tool_time": 0.0,
            "behavior/malformed/json": 1 / 3,
            "behavior/repaired/backslashes": 1 / 3,
            "behavior/repaired/trailing_data": 1 / 3,
        }
    )


def test_ratios_of_nothing_are_left_out():
    metrics = summarize([Behavior.of(PLAIN)], [True])
    assert metrics["behavior/code_ratio"] == 0.0
    missing = {"executable_fraction", "code_lines", "first_call_position", "correct_code_fraction", "limit_fraction"}
    assert not missing & {name.removeprefix("behavior/") for name in metrics}
    assert summarize([]) == {}


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


def test_percentiles_of_call_times_are_over_calls_and_not_over_trajectories():
    many = behavior(call_s=[0.1] * 18, call_queue_s=[0.0] * 18)
    slow = behavior(call_s=[9.0, 1.0], call_queue_s=[4.0, 0.5])
    found = distributions([many, slow, behavior()])
    assert {name: value for name, value in found.items() if name.startswith("tool/")} == {
        "tool/latency_s/p50": 0.1,
        "tool/latency_s/p99": 9.0,
        "tool/queue_s/p99": 4.0,
    }


def test_the_cache_hit_rate_counts_tokens_where_the_engine_reports_them():
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
