"""One response, as a reward sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import DEFAULT_TIMEOUT_S, Verdict, judge
from retool_mcore.reward.extract import extract_answer
from retool_mcore.reward.said import vote


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response, as a reward function sees it.

    ``answer`` is what the model boxed in its last turn. ``text`` is the decoded response with the
    tools' outputs. ``behavior`` has the counts of ``rollout.metrics.Behavior``. ``extra_info`` is
    the row's column of that name.
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
        """The default judgement of the answer; takes up to ``timeout_s`` of CPU time, once."""
        if self.answer is None:
            return Verdict(False, "exact")
        return judge(self.answer, self.truth, timeout_s=self.timeout_s)

    @property
    def right(self) -> bool:
        """Whether the answer is equivalent to the truth."""
        return self.verdict.equivalent

    @property
    def check_failed(self) -> bool:
        """Whether the judgement was asked for and given up; the answer then counts as wrong."""
        return "verdict" in vars(self) and self.verdict.how in ("timeout", "crash")

    def result(self, score: float, acc: float) -> dict[str, Any]:
        """What a reward function returns to verl: the same keys for every response.

        ``pred`` is verl's name for the answer as maj@k counts it. ``check_failed`` is 1.0 when the
        check timed out or crashed, which counts as wrong.
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
    """A response from what verl passes to a reward function.

    ``solution_str`` is the decoded response with its interpreter outputs. The answer is the one in
    the model's words after the last output, outside of calls (``reward.extract``). Our agent loop
    has already read it from the tokens and passes it in ``extra_info`` as ``answer`` beside
    ``behavior``; without ``behavior``, an ``answer`` there is a data file's column and is ignored.
    Raises RewardError when the row has no ground truth.
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
        f"row {extra_info.get('index')} of data source {data_source!r} has reward_model.ground_truth = "
        f"{ground_truth!r}, which is no answer to compare with. Mend the data file"
    )
