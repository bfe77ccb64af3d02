r"""Convert RL problems of common data sets into verl's schema, each problem once.

DAPO-Math-17k has 1.79 million rows: about 17 thousand problems, each about a hundred times. So rows
are read one by one, and only new problems are kept.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from retool_mcore.config.base import is_table
from retool_mcore.data.leaks import normalised
from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.data.sources import ENDINGS
from retool_mcore.data.wrappers import problem_of
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import truth_parses

# Question and answer columns of plain rows: AIME_2024, aime_2025, GSM8K, and files of our own.
COLUMNS = (("problem", "answer"), ("Problem", "Answer"), ("question", "answer"), ("input", "output"))
_GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*\Z", re.DOTALL)

Outcome = Literal["kept", "duplicate", "conflict", "unreadable truth", "too long", "bad row"]
SPLITS = ("train", "test", "val", "validation", "dev")
MAX_PROBLEM_CHARS = 100_000  # anything longer is no problem but a stray book or a broken export
SHOWN_CHARS = 2000  # of the texts of a reject
RARE: Mapping[Outcome, str] = {
    "too long": f"problems of more than {MAX_PROBLEM_CHARS} characters",
    "bad row": "rows that cannot be read",
}


@dataclass
class RlReport:
    """The rows, the count of each outcome, and all rejects except plain repeats."""

    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counts: Counter[Outcome] = field(default_factory=Counter[Outcome])
    rejects: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def lines(self) -> list[str]:
        total = sum(self.counts.values())
        return [
            f"{total} rows",
            f"{len(self.rows)} problems kept",
            f"{self.counts['duplicate']} repeats of a kept problem",
            f"{self.counts['conflict']} repeats with another answer (the first one's answer is kept)",
            f"{self.counts['unreadable truth']} answers that nothing can be compared with",
            *(f"{self.counts[name]} {said}" for name, said in RARE.items() if self.counts[name]),
        ]

    def bad_row(self, where: str, error: DataError) -> None:
        """Record an unreadable row as a reject."""
        self.counts["bad row"] += 1
        self.rejects.append({"where": where, "reason": f"bad row: {error}"})


def convert_rl(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    data_source: str,
    split: str = "train",
    *,
    report: RlReport | None = None,
    reject_bad: bool = False,
) -> RlReport:
    """Convert rows (where, row) of any known schema into verl's, deduplicated by normalised text.

    ``report`` may already hold rejects from reading the file. Raises DataError when no row is left,
    and when a row has no known schema; with ``reject_bad`` such a row becomes a reject.
    """
    report = report or RlReport()
    seen: dict[str, str] = {}
    for where, row in rows:
        try:
            problem, truth = read_problem(row, where)
        except DataError as error:
            if not reject_bad:
                raise
            report.bad_row(where, error)
            continue
        key = normalised(problem)
        outcome: Outcome = "kept"
        if len(problem) > MAX_PROBLEM_CHARS:
            outcome = "too long"
        elif key in seen:
            outcome = "duplicate" if seen[key] == truth else "conflict"
        elif not truth_parses(truth):
            outcome = "unreadable truth"
        report.counts[outcome] += 1
        if outcome == "kept":
            seen[key] = truth
            report.rows.append(rl_row(problem, truth, data_source, split, len(report.rows)))
        elif outcome != "duplicate":
            texts = {"problem": problem[:SHOWN_CHARS], "truth": truth[:SHOWN_CHARS]}
            report.rejects.append({"where": where, "reason": outcome, **texts})
    if not report.rows:
        raise DataError(f"none of {sum(report.counts.values())} rows can be used; the first: {report.rejects[:1]}")
    return report


def rl_row(problem: str, truth: str, data_source: str, split: str, index: int) -> dict[str, Any]:
    """A row of verl's RL schema; the prompt asks for a box."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": hermes_prompt(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def read_problem(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Problem and ground truth of a row. DataError names the row and the column."""
    if "prompt" in row and "reward_model" in row:
        problem, truth = _of_verl(row, where)
    else:
        names = next((names for names in COLUMNS if names[0] in row and names[1] in row), None)
        if names is None:
            known = ", ".join("/".join(names) for names in COLUMNS)
            raise DataError(f"{where}: columns {', '.join(row) or 'none'}; known are prompt/reward_model, {known}")
        problem, truth = row[names[0]], row[names[1]]
        if not isinstance(problem, str) or not problem.strip():
            raise DataError(f"{where}, column {names[0]}: the problem is {problem!r:.80}, not a text")
        truth = truth_text(truth, f"{where}, column {names[1]}")
        if match := _GSM8K_ANSWER.search(truth):
            truth = match[1].replace(",", "")
    return problem_of(problem), truth


def truth_text(truth: Any, where: str) -> str:
    """A ground truth as text. Numbers are written out: 12345678.0 becomes 12345678.

    Raises DataError for anything that is neither text nor number.
    """
    if isinstance(truth, float) and math.isfinite(truth):
        truth = int(truth) if truth.is_integer() else repr(truth)
    if isinstance(truth, int) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str):
        raise DataError(f"{where}: the answer is {truth!r:.80}, not a text or number")
    if not truth.strip():
        raise DataError(f"{where}: the answer is empty")
    return truth.strip()


def _of_verl(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    prompt, reward = row["prompt"], row["reward_model"]
    turns = cast("Sequence[Any]", prompt) if isinstance(prompt, Sequence) else ()
    users = [turn for turn in turns if is_table(turn) and turn.get("role") == "user"]
    if not users or not isinstance(users[-1].get("content"), str):
        raise DataError(f"{where}, column prompt: no user turn with text in {prompt!r:.120}")
    if not is_table(reward) or "ground_truth" not in reward:
        raise DataError(f"{where}, column reward_model: no ground_truth in {reward!r:.120}")
    problem = problem_of(users[-1]["content"])
    if not problem.strip():
        raise DataError(f"{where}, column prompt: the problem is empty")
    return problem, truth_text(reward["ground_truth"], f"{where}, column reward_model")


def name_and_split(source: str) -> tuple[str, str]:
    """data_source and split from a path or hub name: gsm8k/test.jsonl gives "gsm8k" and "test"."""
    path = Path(source)
    stem = path.stem if path.suffix in ENDINGS else path.name
    if stem not in SPLITS:
        return stem or source, "train"
    return path.absolute().parent.name or stem, stem
