"""Optional parts of the reward beyond the paper's, each off by default and logged separately.

- ``call_bonus``: a bonus for every call of a wrong response, and the highest reward with it; 0.1
  and -0.6 in the public recipe.
- ``overlong_buffer_tokens``: DAPO's overlong shaping. A response that runs into the last so many
  tokens before rollout.max_response_tokens, interpreter output included, loses up to 1, linearly.
- ``require``, "format": a right answer counts only when no call of the response was malformed;
  "simplified": only when it is worked out (see ``simplified``).
"""

from retool_mcore.config.rl import Reward
from retool_mcore.errors import RewardError
from retool_mcore.reward.response import Response
from retool_mcore.reward.simplified import simplified


def shaped(reward: Reward, response: Response, max_response_tokens: int) -> dict[str, float]:
    """The shaped score and its parts; {} where nothing is on.

    Only options that are on have parts, so every response has the same ones. Raises RewardError
    when an option needs what the agent loop counts, and that is missing: shaping would silently do
    nothing.
    """
    (bonus, highest), buffer, require = reward.call_bonus, reward.overlong_buffer_tokens, reward.require
    if not (bonus or buffer or require):
        return {}
    behavior = response.behavior
    if not behavior and (bonus or buffer or "format" in require):
        raise RewardError("reward shaping needs the counts of our agent loop (extra_info behavior), and has none")
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
