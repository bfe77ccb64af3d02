"""A reward of one's own: reward.function = "configs.examples.reward:score".

As the paper's, and a response whose last call failed gets less for a right answer.
"""

from retool_mcore.reward.response import Response


def score(response: Response) -> dict[str, float]:
    answer = 1.0 if response.right else -1.0
    calls, ran = response.behavior.get("calls", 0), response.behavior.get("last_call_ok", False)
    unsure = -0.25 if response.right and calls and not ran else 0.0
    return {"score": answer + unsure, "answer_part": answer, "unsure": unsure}
