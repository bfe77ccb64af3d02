r"""Converts RL problems from common data sets to verl's schema and removes duplicates.

DAPO-Math-17k has 1.79 million rows: about 17 thousand problems, each about a hundred times. The
conversion therefore streams the rows and keeps only new problems.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from retool_mcore.data.files import ENDINGS
from retool_mcore.data.layouts import OPTIONS, Columns, NoTruth, UnknownLayout, example, other_roles, read_problem
from retool_mcore.data.leaks import normalised
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.sources import SPLITS, row_split, rows_of_split, split_of
from retool_mcore.errors import DataError
from retool_mcore.reward.answer import truth_problem

Outcome = Literal[
    "kept", "duplicate", "conflict", "unreadable truth", "too long", "too many tokens", "other split", "bad row"
]
MAX_PROBLEM_CHARS = 100_000  # anything longer is a stray book or a broken export
SHOWN_CHARS = 2000  # recorded characters per text of a reject
SHOWN_CONFLICTS = 3
RARE: Mapping[Outcome, str] = {
    "too long": f"problems of more than {MAX_PROBLEM_CHARS} characters",
    "too many tokens": "prompts of more than --max-prompt-tokens",
    "other split": "rows of another split",
    "bad row": "rows that cannot be read",
}


@dataclass
class RlReport:
    """The converted rows, the count of each outcome, and all rejects except exact duplicates."""

    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counts: Counter[Outcome] = field(default_factory=Counter[Outcome])
    rejects: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    first: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the first input row
    conflicts: list[str] = field(default_factory=list[str])  # locations of the first SHOWN_CONFLICTS conflicts
    other_turns: Counter[str] = field(default_factory=Counter[str])  # role of dropped turns -> number of rows

    def lines(self) -> list[str]:
        total = sum(self.counts.values())
        return [
            f"{total} rows",
            f"{len(self.rows)} problems kept",
            f"{self.counts['duplicate']} repeats of a kept problem",
            f"{self.counts['conflict']} repeats with another answer (the first one's answer is kept){self._named()}",
            f"{self.counts['unreadable truth']} answers that nothing can be compared with",
            *(f"{self.counts[name]} {said}" for name, said in RARE.items() if self.counts[name]),
            *(
                f"{count} rows have {role} turns around the problem, which are left out (RL reads a file in verl's "
                "schema with them)"
                for role, count in self.other_turns.items()
            ),
        ]

    def _named(self) -> str:
        more = self.counts["conflict"] - len(self.conflicts)
        return f": {'; '.join(self.conflicts)}{f' and {more} more' if more else ''}" if self.conflicts else ""

    def reject(self, outcome: Outcome, where: str, problem: str, truth: str, why: str = "") -> None:
        """Record a reject with its truncated texts and the reason."""
        self.counts[outcome] += 1
        texts = {"problem": problem[:SHOWN_CHARS], "truth": truth[:SHOWN_CHARS]}
        self.rejects.append({"where": where, "reason": outcome, "why": why, **texts})

    def nothing_left(self) -> str:
        """The error if no row is left, with an example and helpful options."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items()) or "no rows"
        told = f"none of {sum(self.counts.values())} rows can be used ({counts})"
        if self.rejects:
            first = self.rejects[0]
            why = first.get("why") or first["reason"].removeprefix("bad row: ")
            place = "" if why.startswith(first["where"]) else f"{first['where']}: "
            told += f". The first: {place}{why}"
        if self.counts["other split"]:
            told += ". --split chooses another split, or none"
        return f"{told}. A row: {example(self.first)}. {OPTIONS}" if self.first else told

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
    columns: Columns | None = None,
    wanted: str | None = None,
    prompt_format: PromptFormat | None = None,
    too_long: Callable[[list[dict[str, Any]]], str] = lambda _: "",
) -> RlReport:
    """Convert rows (where, row) of any known layout to verl's schema.

    Deduplicates by normalised problem text. ``split``: the split of rows that do not name one.
    ``wanted``: drop rows that name another split; without it, rows of different splits are an
    error. ``prompt_format``: the format of the prompts. ``too_long``: returns why a prompt is too
    long, or "". ``report``: may already contain rejects from reading the file. Raises DataError if
    no row is left or a row is unusable; with ``reject_bad``, an unusable row becomes a reject.
    """
    report = report or RlReport()
    seen: dict[bytes, bytes] = {}
    counts = report.counts
    chosen = rows_of_split(rows, wanted, unnamed=split, on_other=lambda: counts.update({"other split": 1}))
    for where, row in chosen:
        report.first = report.first or row
        try:
            problem, truth = read_problem(row, where, columns)
        except NoTruth as error:
            report.reject("unreadable truth", where, error.problem, "", str(error))
            continue
        except DataError as error:
            if reject_bad:
                report.bad_row(where, error)
                continue
            if isinstance(error, UnknownLayout):
                raise
            raise DataError(
                f"{error}. The row's columns: {', '.join(row)}. --problem, --answer and --solution-box name others; "
                "--reject-bad leaves such rows out, with the reason"
            ) from error
        key, answer = _digest(normalised(problem)), _digest(truth)
        if len(problem) > MAX_PROBLEM_CHARS:
            report.reject("too long", where, problem, truth)
        elif seen.get(key) == answer:
            report.counts["duplicate"] += 1
        elif key in seen:
            report.reject("conflict", where, problem, truth)
            report.conflicts = [*report.conflicts, where][:SHOWN_CONFLICTS]
        elif why := truth_problem(truth):
            report.reject("unreadable truth", where, problem, truth, why)
        else:
            place = (row_split(row) or split, len(report.rows))
            made = rl_row(problem, truth, data_source, *place, asked_in=prompt_format)
            if why := too_long(made["prompt"]):
                report.reject("too many tokens", where, problem, truth, why)
                continue
            seen[key] = answer
            report.counts["kept"] += 1
            report.other_turns.update(other_roles(row, columns))
            report.rows.append(made)
    if not report.rows:
        raise DataError(report.nothing_left())
    return report


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def rl_row(
    problem: str, truth: str, data_source: str, split: str, index: int, *, asked_in: PromptFormat | None = None
) -> dict[str, Any]:
    """A row in verl's RL schema. By default, the prompt asks for a boxed answer."""
    return {
        "data_source": data_source,
        "prompt": (asked_in or PromptFormat()).messages(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def name_and_split(source: str) -> tuple[str, str]:
    """Derive data_source and split from a path or hub name: gsm8k/test.jsonl -> "gsm8k", "test"."""
    path = Path(source)
    ending = max((each for each in ENDINGS if path.name.endswith(each)), key=len, default="")
    stem = path.name.removesuffix(ending)
    split = split_of(stem) or "train"
    return (path.absolute().parent.name or stem, split) if stem in SPLITS else (stem or source, split)
