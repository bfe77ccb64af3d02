"""The paper's two verifications of built data: a trace's form, and its final answer.

The report of every conversion is here, too: the rows that survived, and each reject with its stage
and reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from retool_mcore.data.chat import HERMES_MARKUP
from retool_mcore.data.spool import Spool
from retool_mcore.reward.answer import judge
from retool_mcore.reward.extract import boxes, last_answer

CHECK_TIMEOUT_S = 10.0
Stage = Literal["source", "calculation", "format", "answer", "execution"]


class Rejected(Exception):
    """A row did not survive; holds the stage and the reason."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage: Stage = stage
        self.reason = reason


@dataclass
class VerifiedRows:
    """Rows that survived the ``stages``, and rejects {where, stage, reason, ...}; both on disk."""

    stages: tuple[Stage, ...]
    rows: Spool = field(default_factory=Spool)
    rejects: Spool = field(default_factory=Spool)
    problems: int = 0  # that survived, where one may give several rows

    @property
    def _kept(self) -> int:
        return self.problems or len(self.rows)

    @property
    def survived(self) -> float:
        return self._kept / (self._kept + len(self.rejects))

    def reject(self, where: str, rejected: Rejected, source: Mapping[str, Any]) -> None:
        self.rejects.append({"where": where, "stage": rejected.stage, "reason": rejected.reason, **source})

    def lines(self) -> list[str]:
        """The counts stage by stage, as lines for people."""
        left = self._kept + len(self.rejects)
        lines = [f"{left} rows"]
        counts = Counter(reject["stage"] for reject in self.rejects)
        for stage in self.stages:
            left -= counts[stage]
            lines.append(f"{left} after {stage} ({counts[stage]} rejected)")
        return [*lines, f"{self.survived:.2%} survived"]


def format_problem(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with the form of a trace, or None.

    The right form is: at most one system turn, one user turn, then assistant turns with calls, each
    followed by one result per call, and at the end one assistant turn without calls. Only the last
    turn gives an answer, and only one. No assistant turn holds markup as text.
    """
    turns = list(messages)
    if turns and turns[0]["role"] == "system":
        turns.pop(0)
    if not turns or turns[0]["role"] != "user":
        return "it does not start with the user's question"
    position = 1
    while position < len(turns):
        turn = turns[position]
        if turn["role"] != "assistant":
            return f"turn {position} is a {turn['role']} turn, where the assistant's is due"
        if any(mark in turn["content"] for mark in HERMES_MARKUP):
            return f"turn {position} holds markup as text"
        num_calls = len(turn.get("tool_calls") or [])
        if num_calls == 0:
            break
        if last_answer(turn["content"]) is not None:
            return f"turn {position} gives an answer and makes a call"
        results = turns[position + 1 : position + 1 + num_calls]
        if [result["role"] for result in results] != ["tool"] * num_calls:
            return f"turn {position} makes {num_calls} calls that are not followed by as many results"
        position += 1 + num_calls
    if position != len(turns) - 1:
        return "it does not end in one assistant turn without calls"
    return final_answer_problem(turns[-1]["content"])


def final_answer_problem(text: str) -> str | None:
    """What is wrong with the closing words of a trace, or None.

    They must give one answer, which may be repeated.
    """
    if last_answer(text) is None:
        return "its last turn gives no answer"
    different = list(dict.fromkeys(boxes(text)))
    return f"its last turn boxes different answers: {', '.join(different)[:200]}" if len(different) > 1 else None


def answer_problem(messages: Sequence[Mapping[str, Any]], truth: str) -> str | None:
    """What is wrong with the answer of a trace of the right form, or None.

    The answer must be equivalent to ``truth``, not the same text.
    """
    answer = last_answer(messages[-1]["content"])
    if answer is None:
        return "it gives no answer"
    verdict = judge(answer, truth, timeout_s=CHECK_TIMEOUT_S)
    if verdict.equivalent:
        return None
    failed = f" (the check ended in a {verdict.how})" if verdict.how in ("timeout", "crash") else ""
    return f"its answer {answer!r:.80} is not equivalent to {truth!r:.80}{failed}"
