"""The reward function that verl calls: ``reward.score`` with the settings of [reward], or the
user's function reward.function.
"""

from collections.abc import Mapping
from typing import Any

from retool_mcore.reward import score
from retool_mcore.reward.response import read_response
from retool_mcore.reward.user_function import load_user_reward
from retool_mcore.verl.keys.rollout import settings_of_run


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    run_config: str,
    **_: Any,
) -> dict[str, Any]:
    """Score one response; see ``reward.score.compute_score`` and ``reward.user_function``.

    ``run_config``: path of the run's settings. Ignores the arguments that verl passes for reward
    models. Raises RewardError if the row has no ground truth.
    """
    run = settings_of_run(run_config)
    if run.reward.function:
        response = read_response(data_source, solution_str, ground_truth, extra_info, timeout_s=run.reward.timeout_s)
        return load_user_reward(run.reward.function)(response)
    return score.compute_score(
        data_source,
        solution_str,
        ground_truth,
        extra_info,
        reward=run.reward,
        max_response_tokens=run.rollout.max_response_tokens,
    )
