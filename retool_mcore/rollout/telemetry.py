"""How long, how soon, how full: distributions over a step's trajectories and calls, and what its
groups have learnt.

A percentile is the smallest value that so many of 100 do not exceed; one of nothing is left out,
not invented.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from retool_mcore.rollout.metrics import Behavior

LENGTH_PERCENTILES = (50, 90, 99)
CALL_PERCENTILES = (50, 95, 99)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of ``ordered`` that ``percent`` of 100 do not exceed."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def distributions(behaviors: Iterable[Behavior]) -> dict[str, float]:
    """Over trajectories that were not dropped:

    length/REASON/p50, p90, p99, max   response tokens of those that ended so tool/latency_s/p50,
    p95, p99       seconds of a call from request to answer, the way and retries with it, over calls
    tool/queue_s/..., tool/run_s/...   of these, waiting for a free place in the sandbox, and
    running
    engine/cache_hit_rate              tokens of requests that the engine had in its prefix cache / tokens of requests
    """
    rows = list(behaviors)
    out: dict[str, float] = {}
    for reason in sorted({row.stop_reason for row in rows}):
        lengths = sorted(row.response_tokens for row in rows if row.stop_reason == reason)
        out |= {f"length/{reason}/p{percent}": percentile(lengths, percent) for percent in LENGTH_PERCENTILES}
        out[f"length/{reason}/max"] = lengths[-1]
    calls = {
        "latency_s": [seconds for row in rows for seconds in row.call_s],
        "queue_s": [seconds for row in rows for seconds in row.call_queue_s],
        "run_s": [seconds for row in rows for seconds in row.call_run_s],
    }
    for name, times_s in calls.items():
        if ordered := sorted(times_s):
            out |= {f"tool/{name}/p{percent}": percentile(ordered, percent) for percent in CALL_PERCENTILES}
    if sent := sum(row.context_tokens for row in rows):
        out["engine/cache_hit_rate"] = sum(row.cached_tokens for row in rows) / sent
    return out


def group_shares(
    uids: Sequence[str], correct: Sequence[bool], filtered: Mapping[float, int] | None = None, discarded: int = 0
) -> dict[str, float]:
    """``uids`` [N]: the prompt of each trajectory; ``correct`` [N]: was its answer right. A group
    is a prompt's.

    groups/all_right, groups/all_wrong   groups whose answers are all so / groups

    Before algorithm.filter_groups: what it put aside counts, ``filtered``: groups by the accuracy
    that all of their trajectories shared, and ``discarded``: mixed ones that were more than the
    batch needed.
    """
    groups: dict[str, list[bool]] = {}
    for uid, right in zip(uids, correct, strict=True):
        groups.setdefault(uid, []).append(right)
    aside = filtered or {}
    count = len(groups) + sum(aside.values()) + discarded
    if not count:
        return {}
    right = sum(all(each) for each in groups.values()) + sum(aside[score] for score in aside if score > 0)
    wrong = sum(not any(each) for each in groups.values()) + sum(aside[score] for score in aside if score <= 0)
    return {"groups/all_right": right / count, "groups/all_wrong": wrong / count}
