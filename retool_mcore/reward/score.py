"""The reward function that verl calls: as in the paper, +1 for a right answer, -1 otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.config.rl import Reward
from retool_mcore.reward.response import read_response
from retool_mcore.reward.said import vote
from retool_mcore.reward.shaping import Shaping, behavior_of

PAPER = Reward()  # +1 and -1, without shaping


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward: Reward = PAPER,
    max_response_tokens: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """Score one response. verl's reward managers call this from several threads.

    See ``read_response`` for what it is read from. ``reward``: a run's section, whose shaping may
    need ``max_response_tokens``.

    Returns the same keys for every response, as verl needs: score, acc (1.0 or 0.0), answer ("" if
    none), pred (verl's name for the answer as maj@k counts it), has_answer and check_failed (1.0
    when the check timed out or crashed, which counts as wrong). The parts of the shaping are added
    to score and also returned separately, with reward_answer for the answer alone. Raises
    RewardError when the row has no ground truth.
    """
    response = read_response(data_source, solution_str, ground_truth, extra_info, timeout_s=reward.timeout_s)
    right, shaping = response.right, Shaping.of(reward, max_response_tokens)
    result = {
        "score": reward.answer[0 if right else 1],
        "acc": float(right),
        "pred": vote(response.answer),
        "extracted": response.answer or "",
        "has_answer": float(response.answer is not None),
        "check_failed": float(response.check_failed),
    }
    if shaping.on:
        behavior = behavior_of(extra_info) if shaping.needs_behavior else dict[str, Any]()
        counts = shaping.counts(response, behavior)
        base = reward.answer[0 if counts else 1]
        parts = shaping.parts(counts, base, behavior)
        added = sum(value for name, value in parts.items() if name != "format_ok")
        told = {"simplified_ok": float(shaping.worked_out(response))} if shaping.require_simplified else {}
        result |= {"score": base + added, "reward_answer": base, **parts, **told}
    return result


def mean_parts(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each part over results of ``compute_score``, as metrics ``reward/NAME``.

    score and acc are left out, because verl reports them.
    """
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, float) and name not in ("score", "acc"):
                values.setdefault(f"reward/{name.removeprefix('reward_')}", []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
