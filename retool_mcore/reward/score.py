"""The reward function that verl calls: as in the paper, +1 for a right answer, -1 otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.config.rl import Reward
from retool_mcore.reward.response import read_response
from retool_mcore.reward.shaping import shaped

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

    Returns ``Response.result``, and the parts of the shaping, which are added to score and also
    returned separately, with reward_answer for the answer alone. Raises RewardError when the row
    has no ground truth.
    """
    response = read_response(data_source, solution_str, ground_truth, extra_info, timeout_s=reward.timeout_s)
    result = response.result(reward.answer[0 if response.right else 1], float(response.right))
    return result | shaped(reward, response, max_response_tokens)


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
