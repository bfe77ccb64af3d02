"""The reward function that verl calls: as in the paper, +1 for a right answer, -1 otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import DEFAULT_TIMEOUT_S, Verdict, check
from retool_mcore.reward.extract import extract_answer
from retool_mcore.reward.normalise import vote
from retool_mcore.reward.shaping import Shaping, behavior_of

PLAIN = Shaping()  # the paper's reward


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    correct: float = 1.0,
    wrong: float = -1.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    shaping: Shaping = PLAIN,
    **_: Any,
) -> dict[str, Any]:
    """Score one response. verl's reward managers call this from several threads.

    ``solution_str`` is the decoded response with its interpreter outputs. The answer is the one in
    the model's words after the last output, outside of calls (``reward.extract``). Our agent loop
    has already read it from the tokens and passes it in ``extra_info`` as ``answer`` beside
    ``behavior``; without ``behavior``, an ``answer`` there is a data file's column and is ignored.

    Returns the same keys for every response, as verl needs: score, acc (1.0 or 0.0), answer ("" if
    none), pred (verl's name for the answer as maj@k counts it), has_answer and check_failed (1.0
    when the check timed out or crashed, which counts as wrong). The parts of ``shaping`` are added
    to score and also returned separately, with reward_answer for the answer alone. Raises
    RewardError when the row has no ground truth.
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
    if shaping.on:
        behavior = behavior_of(extra_info)
        counts = shaping.counts(verdict.equivalent, behavior)
        base = float(correct if counts else wrong)
        parts = shaping.parts(counts, base, behavior)
        added = sum(value for name, value in parts.items() if name != "format_ok")
        result |= {"score": base + added, "reward_answer": base, **parts}
    return result


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
