"""The default reward function: +1 for a right answer and -1 otherwise, as in the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.config.rl import Reward
from retool_mcore.reward.response import read_response
from retool_mcore.reward.shaping import shape_reward

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
    """Score one response. verl's reward managers call this from several threads,
    through ``verl.reward``.

    ``read_response`` documents the first four arguments. ``reward`` is a run's section [reward];
    ``max_response_tokens`` is needed only for reward.overlong_buffer_tokens.

    Returns ``Response.result``. With shaping, "score" is the sum of the parts, and each part is
    returned as well: "reward_answer" for the answer, "reward_NAME" for the others. Raises
    RewardError if the row has no ground truth.
    """
    response = read_response(data_source, solution_str, ground_truth, extra_info, timeout_s=reward.timeout_s)
    result = response.result(reward.answer[0 if response.right else 1], float(response.right))
    return result | shape_reward(reward, response, max_response_tokens)


def mean_parts(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each part over results of ``compute_score``, as metrics ``reward/NAME``.

    Skips "score" and "acc", which verl reports.
    """
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, float) and name not in ("score", "acc"):
                values.setdefault(f"reward/{name.removeprefix('reward_')}", []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
