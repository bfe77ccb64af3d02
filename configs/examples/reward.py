"""A custom reward: reward.function = "configs.examples.reward:score".

It is the paper's reward, except that a right answer earns less if the last call failed.
"""

from retool_mcore.reward.response import Response


def score(response: Response) -> dict[str, float]:
    answer = 1.0 if response.right else -1.0
    calls, ran = response.behavior.get("calls", 0), response.behavior.get("last_call_ok", False)
    unsure = -0.25 if response.right and calls and not ran else 0.0
    return {"score": answer + unsure, "answer_part": answer, "unsure": unsure}
