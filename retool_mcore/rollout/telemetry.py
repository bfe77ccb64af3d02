"""Distributions over a step's trajectories and calls, and the shares of its groups.

The p-th percentile is the smallest value that p of 100 values do not exceed. A percentile of no
values is left out, not invented.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from retool_mcore.rollout.metrics import Behavior

LENGTH_PERCENTILES = (50, 90, 99)
CALL_PERCENTILES = (50, 95, 99)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value of ``ordered`` that ``percent`` of 100 values do not exceed."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def distributions(behaviors: Iterable[Behavior]) -> dict[str, float]:
    """Percentiles over trajectories that were not dropped, and over their calls.

    length/REASON/p50, p90, p99, max   response tokens of trajectories that ended for this reason
    tool/latency_s/p50, p95, p99       seconds of a call from request to answer, including transport
                                       and retries, over calls
    tool/queue_s/..., tool/run_s/...   of these, seconds waiting for a free place in the sandbox,
                                       and seconds running
    engine/cache_hit_rate              request tokens that the engine had in its prefix cache /
                                       request tokens
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
    uids: Sequence[str],
    correct: Sequence[bool],
    rewards: Sequence[float],
    filtered: Mapping[float, int] | None = None,
    discarded: int = 0,
) -> dict[str, float]:
    """The shares of groups that are alike; a group is one prompt's.

    ``uids`` [N]: the prompt of each trajectory; ``correct`` [N]: was its answer right;
    ``rewards`` [N].

    groups/all_right     groups whose answers are all right / groups
    groups/all_wrong     groups whose answers are all wrong / groups
    groups/same_reward   groups whose rewards are all the same / groups that the step learns from

    For the first two, groups that algorithm.filter_groups set aside count as well. ``filtered``:
    the number of groups by the accuracy that all of their trajectories share; ``discarded``: mixed
    groups that the batch did not need.
    """
    groups: dict[str, list[bool]] = {}
    scores: dict[str, set[float]] = {}
    for uid, right, reward in zip(uids, correct, rewards, strict=True):
        groups.setdefault(uid, []).append(right)
        scores.setdefault(uid, set()).add(reward)
    aside = filtered or {}
    count = len(groups) + sum(aside.values()) + discarded
    if not count:
        return {}
    right = sum(all(each) for each in groups.values()) + sum(aside[score] for score in aside if score > 0)
    wrong = sum(not any(each) for each in groups.values()) + sum(aside[score] for score in aside if score <= 0)
    shares = {"groups/all_right": right / count, "groups/all_wrong": wrong / count}
    if groups:
        shares["groups/same_reward"] = sum(len(each) == 1 for each in scores.values()) / len(groups)
    return shares
