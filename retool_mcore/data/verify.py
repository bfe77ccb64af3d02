"""The paper's two checks of SFT data: the format of a trace and its final answer.

Also defines the report of a conversion: the rows that passed, and each reject with its stage and
reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retool_mcore.data.chat import HERMES_MARKUP, ROLES, order_problem
from retool_mcore.data.layouts import example
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import judge
from retool_mcore.reward.extract import boxes, last_answer

CHECK_TIMEOUT_S = 10.0


class Rejected(Exception):
    """A row failed a stage of the conversion, for ``reason``."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason


@dataclass
class ConversionReport:
    """The rows that passed all ``stages``, and the rejects {where, stage, reason, ...}."""

    stages: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rejects: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counts: Counter[str] = field(default_factory=Counter[str])  # rows that failed each stage, including exact repeats
    problems: int = 0  # number of problems that passed, if a problem may have several rows
    notes: Counter[str] = field(default_factory=Counter[str])  # changes made in the rows that passed

    @property
    def _kept(self) -> int:
        return self.problems or len(self.rows)

    @property
    def share_kept(self) -> float:
        """Kept / (kept + rejects). Exact repeats are not rejects."""
        return self._kept / (self._kept + len(self.rejects))

    def reject(self, where: str, rejected: Rejected, source: Mapping[str, Any]) -> None:
        self.counts[rejected.stage] += 1
        self.rejects.append({"where": where, "stage": rejected.stage, "reason": rejected.reason, **source})

    def reject_unreadable(self, where: str, error: DataError) -> None:
        self.reject(where, Rejected("source", str(error)), {})

    def lines(self) -> list[str]:
        """The counts per stage, as text lines."""
        left = self._kept + self.counts.total()
        lines = [f"{left} rows"]
        for stage in self.stages:
            left -= self.counts[stage]
            lines.append(f"{left} after {stage} ({self.counts[stage]} rejected)")
        notes = [f"{what}: {count}" for what, count in self.notes.most_common()]
        return [*lines, f"{self.share_kept:.2%} survived, ignoring exact repeats", *notes]

    def nothing_left(self, first_row: Mapping[str, Any], remedy: str) -> DataError:
        """The error if no row passed: the first reject, an example row, and a remedy."""
        if not self.rejects:
            counts = ", ".join(f"{count} rejected by {stage}" for stage, count in self.counts.items()) or "no rows"
            return DataError(f"no row can be used ({counts}). {remedy}")
        first = self.rejects[0]
        place = "" if first["reason"].startswith(first["where"]) else f"{first['where']}: "
        message = f"none of {self.counts.total()} rows survived; the first: {place}{first['reason']}"
        if first_row:
            message += f". Its columns: {', '.join(first_row)}. A row: {example(first_row)}"
        return DataError(message if message.endswith(remedy) else f"{message}. {remedy}")


def format_problem(messages: Sequence[Mapping[str, Any]], *, box: bool = True) -> str | None:
    """The error in the format of a conversation, or None.

    The expected format is: optional system turns, a user turn, assistant turns with calls, each
    followed by one result per call, and an assistant turn without calls. More user turns with their
    answers may follow. No assistant turn may contain markup as text. With ``box``, the last turn
    must have one boxed answer, and no turn with a call may have any.
    """
    roles = [turn["role"] for turn in messages]
    strange = next((index for index, role in enumerate(roles) if role not in ROLES), None)
    if strange is not None:
        return f"message {strange} has role {roles[strange]!r}"
    if problem := order_problem(messages):
        return problem
    before = ""
    for index, turn in enumerate(messages):
        role, calls = turn["role"], turn.get("tool_calls")
        if role == "assistant":
            if any(mark in turn["content"] for mark in HERMES_MARKUP):
                return f"message {index} contains markup as text"
            if before == "assistant":
                return f"message {index} is a second assistant turn in a row"
            if box and calls and last_answer(turn["content"]) is not None:
                return f"message {index} has both an answer and a call"
        elif role == "user" and before in ("user", "tool"):
            return f"message {index} is a user turn instead of an assistant turn"
        before = role
    last = messages[-1] if messages else {"role": "user"}
    if last["role"] != "assistant" or last.get("tool_calls"):
        return "it does not end with an assistant turn without calls"
    return final_answer_problem(last["content"]) if box else None


def final_answer_problem(text: str) -> str | None:
    """The error in the final text of a trace, or None.

    The text must have exactly one answer, which may be repeated.
    """
    if last_answer(text) is None:
        return "its last turn has no answer"
    different = list(dict.fromkeys(boxes(text)))
    return f"its last turn boxes different answers: {', '.join(different)[:200]}" if len(different) > 1 else None


def answer_problem(messages: Sequence[Mapping[str, Any]], truth: str) -> str | None:
    """The error in the answer of a well-formed trace, or None.

    The answer must be equivalent to ``truth``; the text may differ.
    """
    answer = last_answer(messages[-1]["content"])
    if answer is None:
        return "it has no answer"
    verdict = judge(answer, truth, timeout_s=CHECK_TIMEOUT_S)
    if verdict.equivalent:
        return None
    failed = f" (the check failed: {verdict.how})" if verdict.how in ("timeout", "crash") else ""
    return f"its answer {answer!r:.80} is not equivalent to {truth!r:.80}{failed}"
