"""Optional reward shaping beyond the paper: off by default, each part logged separately.

- ``call_bonus``: a bonus per call of a wrong response, and the reward at which the bonus is
  capped; 0.1 and -0.6 in verl's ReTool recipe.
- ``overlong_buffer_tokens``: DAPO's overlong shaping. The last tokens before
  rollout.max_response_tokens, interpreter output included, cost up to 1, linearly.
- ``require``: "format" rewards a right answer only if no call of the response was malformed,
  "simplified" only if the model worked it out (see ``simplified``).
"""

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.response import Response
from retool_mcore.reward.simplified import simplified


def shape_reward(reward: Reward, response: Response, max_response_tokens: int) -> dict[str, float]:
    """The shaped score and its parts; {} if no shaping is on.

    Only options that are on have parts, so all responses of a run have the same parts. Raises
    RewardError if an option needs the agent loop's counts and ``response.behavior`` is empty.
    """
    (bonus, highest), buffer, require = reward.call_bonus, reward.overlong_buffer_tokens, reward.require
    if not (bonus or buffer or require):
        return {}
    behavior = response.behavior
    if not behavior and (bonus or buffer or "format" in require):
        raise RewardError(
            "reward shaping needs the agent loop's counts, but extra_info has no behavior. Leave out call_bonus, "
            'overlong_buffer_tokens and require = ["format"] for responses of another loop'
        )
    worked_out = not ("simplified" in require and response.right) or simplified(response.answer or "", response.truth)
    right = response.right and worked_out and not ("format" in require and behavior["malformed"])
    base = reward.answer[0 if right else 1]
    added: dict[str, float] = {}
    if bonus:
        added["reward_calls"] = 0.0 if right else min(bonus * behavior["calls"], max(highest - base, 0.0))
    if buffer:
        over = behavior["response_tokens"] - (max_response_tokens - buffer)
        added["reward_overlong"] = -min(max(over / buffer, 0.0), 1.0)
    parts = {"score": base + sum(added.values()), "reward_answer": base, **added}
    if "format" in require:
        parts["format_ok"] = float(not behavior["malformed"])
    if "simplified" in require:
        parts["simplified_ok"] = float(worked_out)
    return parts
