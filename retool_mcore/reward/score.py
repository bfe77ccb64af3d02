"""The reward function verl calls: +1 for an answer equivalent to the truth, -1 otherwise, as in the
paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import DEFAULT_TIMEOUT_S, Verdict, check
from retool_mcore.reward.extract import extract_answer
from retool_mcore.reward.normalise import vote
from retool_mcore.reward.shaping import Shaping, behavior_of


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    correct: float = 1.0,
    wrong: float = -1.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    shaping: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Score one response; called by verl's reward managers from several threads.

    ``solution_str`` is the decoded response with its interpreter outputs: the answer is looked for
    in the model's words after the last output, outside of calls (``reward.extract``). Our agent
    loop has read it off the tokens already and gives it in ``extra_info`` (``answer`` beside
    ``behavior``; a data file's own ``answer`` column is not believed). Returns score, acc (1.0 or
    0.0), answer ("" if none), pred (the answer as maj@k counts it, verl's name), has_answer and
    check_failed (1.0 when the check ran into its time limit or crashed, which counts as wrong); the
    same keys for every response, as verl needs them. ``shaping`` holds the options of
    ``reward.shaping`` that are not at their default; their parts are added to score and returned
    beside it, with reward_answer, the part for the answer alone. Raises RewardError when the row
    has no ground truth.
    """
    truth = _truth(ground_truth, data_source, extra_info)
    if extra_info is not None and "behavior" in extra_info and "answer" in extra_info:
        answer = extra_info["answer"]
    else:
        answer = extract_answer(solution_str)
    verdict = Verdict(False, "exact") if answer is None else check(answer, truth, timeout_s=timeout_s)
    result = {
        "score": float(correct if verdict.equivalent else wrong),
        "acc": float(verdict.equivalent),
        "pred": vote(answer),
        "answer": answer or "",
        "has_answer": float(answer is not None),
        "check_failed": float(verdict.how in ("timeout", "crash")),
    }
    options = Shaping(**(shaping or {}))
    if options.on:
        behavior = behavior_of(extra_info)
        counts = options.counts(verdict.equivalent, behavior)
        base = float(correct if counts else wrong)
        parts = options.parts(counts, base, behavior)
        added = sum(value for name, value in parts.items() if name != "format_ok")
        result |= {"score": base + added, "reward_answer": base, **parts}
    return result


def mean_parts(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each part over results of ``compute_score``, as metrics ``reward/NAME``; score
    and acc are verl's.
    """
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, float) and name not in ("score", "acc"):
                values.setdefault(f"reward/{name.removeprefix('reward_')}", []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def _truth(ground_truth: Any, data_source: str, extra_info: Mapping[str, Any] | None) -> str:
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        return str(ground_truth)
    if isinstance(ground_truth, str) and ground_truth.strip():
        return ground_truth
    index = (extra_info or {}).get("index")
    raise RewardError(
        f"row {index} of data source {data_source!r} has reward_model.ground_truth = {ground_truth!r}, which is no "
        "answer to compare with. Mend the data file"
    )
