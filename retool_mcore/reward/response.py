"""The response that a reward function receives, and how to build it from verl's arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import DEFAULT_TIMEOUT_S, Verdict, judge
from retool_mcore.reward.extract import extract_answer
from retool_mcore.reward.statement import vote


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response, as a reward function receives it.

    - ``data_source``, ``extra_info``: the row's columns of these names.
    - ``truth``: the row's reward_model.ground_truth.
    - ``answer``: the content of the model's last box, or None.
    - ``text``: the decoded response with the tools' outputs.
    - ``behavior``: the counts of ``rollout.metrics.Behavior``, such as "calls".
    - ``timeout_s``: CPU seconds that the judge may take.
    """

    data_source: str
    truth: str
    answer: str | None
    text: str
    behavior: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = DEFAULT_TIMEOUT_S

    @cached_property
    def verdict(self) -> Verdict:
        """The judge's verdict. The first access takes up to ``timeout_s`` of CPU time."""
        if self.answer is None:
            return Verdict(False, "exact")
        return judge(self.answer, self.truth, timeout_s=self.timeout_s)

    @property
    def right(self) -> bool:
        """Whether the answer is equivalent to the truth."""
        return self.verdict.equivalent

    @property
    def check_failed(self) -> bool:
        """Whether the judge was used and did not finish; the answer then counts as wrong."""
        return "verdict" in vars(self) and self.verdict.how in ("timeout", "crash")

    def result(self, score: float, acc: float) -> dict[str, Any]:
        """The result for verl, with the same keys for every response.

        ``pred`` is the vote for maj@k, under verl's name. ``check_failed`` is 1.0 if the check
        timed out or crashed.
        """
        return {
            "score": score,
            "acc": acc,
            "pred": vote(self.answer),
            "extracted": self.answer or "",
            "has_answer": float(self.answer is not None),
            "check_failed": float(self.check_failed),
        }


def read_response(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Response:
    """Build a Response from the arguments that verl passes to a reward function.

    ``solution_str`` is the decoded response with its interpreter outputs; ``reward.extract`` finds
    the answer in it. Our agent loop has already read the answer from the tokens and passes it as
    ``extra_info["answer"]`` together with ``behavior``. Without ``behavior``, ``answer`` is a
    column of the data file and is ignored. Raises RewardError if the row has no ground truth.
    """
    extra = extra_info or {}
    truth = _truth(ground_truth, data_source, extra)
    answer = extra["answer"] if "behavior" in extra and "answer" in extra else extract_answer(solution_str)
    return Response(
        data_source=data_source,
        truth=truth,
        answer=answer,
        text=solution_str,
        behavior=extra.get("behavior") or {},
        extra_info=extra,
        timeout_s=timeout_s,
    )


def _truth(ground_truth: Any, data_source: str, extra_info: Mapping[str, Any]) -> str:
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        return str(ground_truth)
    if isinstance(ground_truth, str) and ground_truth.strip():
        return ground_truth
    raise RewardError(
        f"row {extra_info.get('index')} of data source {data_source!r} has no usable truth: "
        f"reward_model.ground_truth = {ground_truth!r}. Correct the row: the truth is a number or a text"
    )
