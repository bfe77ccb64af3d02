"""Behaviour metrics of trajectories, with their definitions.

``Behavior.of`` counts within one trajectory. ``summarize`` turns counts into the ``behavior/``
metrics of a training step or an evaluation; ``distributions`` computes percentiles. Both omit a
ratio whose denominator is 0 (such as ``executable_fraction`` without calls) and a percentile of no
values.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Self

from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.loop import CallResult, Trajectory

PER_TRAJECTORY = (  # fields reported as their mean over trajectories
    "calls",
    "turns",
    "requests",
    "response_tokens",
    "model_tokens",
    "self_corrections",
    "cut_tokens",
    "engine_s",
    "tool_s",
)


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Counts of one trajectory. For the last five fields see ``Trajectory``."""

    stop_reason: str
    turns: int
    calls: int  # executed
    calls_ok: int  # executed calls that finished successfully (exit status 0)
    calls_at_limit: int  # executed calls that hit the time or memory limit
    last_call_ok: bool  # False without calls
    code_lines: int  # non-blank lines of executed code
    first_call_tokens: int | None  # response tokens up to the end of the first executed call
    response_tokens: int
    model_tokens: int  # response tokens that the model sampled
    self_corrections: int  # failed calls whose next executed call has different code and succeeds
    cut_outputs: int  # results over the token budget, shown with their middle cut
    cut_tokens: int  # tokens cut from these results
    engine_s: float
    tool_s: float
    malformed: Mapping[str, int] = field(default_factory=dict[str, int])  # by kind of problem
    repairs: Mapping[str, int] = field(default_factory=dict[str, int])  # by kind
    call_s: list[float] = field(default_factory=list[float])  # of each executed call, from request to result
    call_queue_s: list[float] = field(default_factory=list[float])  # of these, waiting for a sandbox slot
    tool_calls: Mapping[str, int] = field(default_factory=dict[str, int])  # of tools other than the interpreter
    requests: int = 0
    context_tokens: int = 0
    cached_tokens: int = 0
    tool_faults: Mapping[str, int] = field(default_factory=dict[str, int])
    tool_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        results = [result for turn in trajectory.turns for result in turn.results]
        code = [result for result in results if result.tool == TOOL_NAME]
        parsed = [turn.parsed for turn in trajectory.turns if turn.parsed]
        first = next((turn for turn in trajectory.turns if turn.results), None)
        return cls(
            stop_reason=trajectory.stop_reason,
            turns=len(trajectory.turns),
            calls=len(results),
            calls_ok=sum(result.ok for result in results),
            calls_at_limit=sum(result.status != "finished" for result in results),
            last_call_ok=bool(results) and results[-1].ok,
            code_lines=sum(bool(line.strip()) for result in code for line in result.code.splitlines()),
            tool_calls=dict(Counter(result.tool for result in results if result.tool != TOOL_NAME)),
            tool_faults=dict(trajectory.faults),
            tool_numbers={name: dict(numbers) for name, numbers in trajectory.tool_numbers.items()},
            first_call_tokens=first.start + first.tokens if first else None,
            response_tokens=len(trajectory.ledger.response_ids),
            model_tokens=trajectory.ledger.model_tokens,
            self_corrections=_self_corrections(results),
            cut_outputs=sum(result.cut_tokens > 0 for result in results),
            cut_tokens=sum(result.cut_tokens for result in results),
            engine_s=trajectory.engine_s,
            tool_s=trajectory.tool_s,
            # dict, because dataclasses.asdict rebuilds a Counter from its items and counts those
            malformed=dict(Counter(turn.problem for turn in parsed if turn.problem)),
            repairs=dict(Counter(kind for turn in parsed for kind in turn.repairs)),
            call_s=[result.wall_s for result in results],
            call_queue_s=[result.queue_s for result in results],
            requests=trajectory.requests,
            context_tokens=trajectory.context_tokens,
            cached_tokens=trajectory.cached_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _self_corrections(results: Sequence[CallResult]) -> int:
    return sum(
        not failed.ok and then.ok and failed.code.strip() != then.code.strip() for failed, then in pairwise(results)
    )


def summarize(behaviors: Iterable[Behavior], correct: Sequence[bool] | None = None) -> dict[str, float]:
    """``behavior/`` metrics over the trajectories that were not dropped; see docs/metrics.md.

    ``correct`` [N]: whether each trajectory's answer is correct. Token counts are omitted if a chat
    API reports none.
    """
    rows = list(behaviors)
    if not rows:
        return {}
    assert correct is None or len(correct) == len(rows), f"{len(correct or ())} verdicts for {len(rows)} trajectories"
    count, with_code = len(rows), [row for row in rows if row.calls]
    calls = sum(row.calls for row in rows)
    out: dict[str, float] = {"code_ratio": len(with_code) / count}
    has_tokens = any(row.response_tokens for row in rows)  # a model behind a chat API has none
    for name in PER_TRAJECTORY:
        if has_tokens or not name.endswith("_tokens"):
            out[name] = sum(getattr(row, name) for row in rows) / count
    slowest = max(rows, key=lambda row: row.engine_s + row.tool_s)
    out |= {"slowest_s": slowest.engine_s + slowest.tool_s, "slowest_tool_s": slowest.tool_s}
    if calls:
        out["code_lines"] = sum(row.code_lines for row in rows) / calls
        out["executable_fraction"] = sum(row.calls_ok for row in rows) / calls
        out["limit_fraction"] = sum(row.calls_at_limit for row in rows) / calls
        out["cut_output_fraction"] = sum(row.cut_outputs for row in rows) / calls
        positions = [(row.first_call_tokens or 0) / row.response_tokens for row in with_code if row.response_tokens]
        out |= {"first_call_position": sum(positions) / len(positions)} if positions else {}
    if with_code and correct is not None:
        right = sum(bool(row.calls and row.last_call_ok and good) for row, good in zip(rows, correct, strict=True))
        out["correct_code_fraction"] = right / len(with_code)
    for reason in StopReason:
        if reason != StopReason.DROPPED:
            out[f"stop/{reason}"] = sum(row.stop_reason == reason for row in rows) / count
    kinds = {"malformed": "malformed", "repairs": "repaired", "tool_calls": "calls", "tool_faults": "tool_faults"}
    for group, name in kinds.items():
        totals: Counter[str] = Counter()
        for row in rows:
            totals.update(getattr(row, group))
        out |= {f"{name}/{kind}": total / count for kind, total in totals.items()}
    return {f"behavior/{name}": value for name, value in out.items()}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of values sorted in ascending order; ``percent`` in 1..100."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def distributions(behaviors: Iterable[Behavior]) -> dict[str, float]:
    """Percentiles over undropped trajectories and their calls, and the prefix cache's hit rate.

    length/finished/p50, p99     response tokens of trajectories that stopped as FINISHED
    tool/latency_s/p50, p99      seconds per call from request to result, including transport and
                                 retries
    tool/queue_s/p99             of these, seconds waiting for a free sandbox slot
    engine/cache_hit_rate        context tokens that hit the engine's prefix cache / context tokens
    """
    rows = list(behaviors)
    values: dict[str, tuple[list[float], tuple[int, ...]]] = {
        "length/finished": ([row.response_tokens for row in rows if row.stop_reason == StopReason.FINISHED], (50, 99)),
        "tool/latency_s": ([seconds for row in rows for seconds in row.call_s], (50, 99)),
        "tool/queue_s": ([seconds for row in rows for seconds in row.call_queue_s], (99,)),
    }
    out: dict[str, float] = {}
    for name, (numbers, percents) in values.items():
        if ordered := sorted(numbers):
            out |= {f"{name}/p{percent}": percentile(ordered, percent) for percent in percents}
    if sent := sum(row.context_tokens for row in rows):
        out["engine/cache_hit_rate"] = sum(row.cached_tokens for row in rows) / sent
    return out


def group_shares(
    uids: Sequence[str],
    correct: Sequence[bool],
    rewards: Sequence[float],
    filtered: Mapping[float, int] | None = None,
    discarded: int = 0,
) -> dict[str, float]:
    """Shares of groups with uniform outcomes. A group is all trajectories of one prompt.

    ``uids`` [N]: each trajectory's prompt id. ``correct`` [N]: whether its answer is correct.
    ``rewards`` [N]: its reward.

    groups/all_right     groups whose answers are all correct / groups
    groups/all_wrong     groups whose answers are all wrong / groups
    groups/same_reward   groups whose rewards are all equal / groups in the training batch

    The first two include groups that algorithm.filter_groups removed. ``filtered``: the number of
    removed uniform groups, by their accuracy. ``discarded``: mixed groups that the batch did not
    need.
    """
    groups: dict[str, list[bool]] = {}
    scores: dict[str, set[float]] = {}
    for uid, right, reward in zip(uids, correct, rewards, strict=True):
        groups.setdefault(uid, []).append(right)
        scores.setdefault(uid, set()).add(reward)
    removed = filtered or {}
    count = len(groups) + sum(removed.values()) + discarded
    if not count:
        return {}
    right = sum(map(all, groups.values())) + sum(removed[score] for score in removed if score > 0)
    wrong = sum(not any(verdicts) for verdicts in groups.values()) + sum(
        removed[score] for score in removed if score <= 0
    )
    shares = {"groups/all_right": right / count, "groups/all_wrong": wrong / count}
    if groups:
        shares["groups/same_reward"] = sum(len(distinct) == 1 for distinct in scores.values()) / len(groups)
    return shares
