r"""Reads the problem and ground truth of a row in the column layouts of public data sets.

The user can also name the columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.prompt_format import problem_of
from retool_mcore.errors import DataError
from retool_mcore.reward.extract import boxes

_GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*\Z", re.DOTALL)
_COUNTED = re.compile(r"(-?[\d.,/]+)\s+\(\s*[A-Za-z][A-Za-z .-]*\)")  # ASDiv: 9 (apples)
_PLACE = re.compile(r"N_(\d\d)")  # MAWPS: a placeholder for a number in column Numbers
_CHOICES = ("options", "choices")  # AGIEval and AQuA, MMLU
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
EXAMPLE_COLUMNS, EXAMPLE_CHARS = 6, 60  # for the example row in an error message
OPTIONS = (
    "Name the columns: --problem, and --answer, or --solution-box for a solution whose last \\boxed{} is the answer"
)


class UnknownLayout(DataError):
    """A row whose columns match neither a known layout nor the columns that the user named."""


class NoTruth(DataError):
    """A row of a known layout without a usable ground truth.

    ``problem``: the row's problem, for reports.
    """

    problem: str = ""


@dataclass(frozen=True)
class Columns:
    """A column layout.

    ``problem``: columns that together state the problem. ``answer``: the column with the ground
    truth. ``box``: the ground truth is the last \\boxed{} in that column.
    """

    problem: tuple[str, ...]
    answer: str
    box: bool = False

    @classmethod
    def named(cls, problem: Sequence[str] | None, answer: str, solution_box: str) -> Columns | None:
        """The layout from a command's options; None if no option is set.

        Raises DataError if the options name only the problem or only the answer.
        """
        if not (problem or answer or solution_box):
            return None
        if not problem or bool(answer) == bool(solution_box):
            raise DataError("Use --problem together with one of --answer and --solution-box, or none of the three")
        return cls(tuple(problem), answer or solution_box, bool(solution_box))

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(name in row for name in (*self.problem, self.answer))

    def __str__(self) -> str:
        return f"{'+'.join(self.problem)}/{self.answer}"


# The first matching layout is used, so answer columns come before boxed answers in solutions.
LAYOUTS = (
    Columns(("problem",), "answer"),  # AIME, Big-Math, NuminaMath-1.5, DAPO-Math-17k without instructions
    Columns(("Problem",), "Answer"),
    Columns(("body", "question"), "answer"),  # ASDiv
    Columns(("Body", "Question"), "Answer"),  # SVAMP
    Columns(("question",), "final_answer"),  # OlympiadBench
    Columns(("question",), "answer_number"),  # MGSM, where column answer is a solution or null
    Columns(("question",), "answer"),  # GSM8K
    Columns(("Question",), "Answer"),  # MAWPS
    Columns(("question",), "result"),  # MAWPS
    Columns(("content",), "answer"),  # CARP
    Columns(("input",), "output"),
    Columns(("input",), "target"),  # MAWPS
    Columns(("question",), "gt"),  # ToRA
    Columns(("question",), "golden"),  # cmath
    Columns(("problem",), "solution", box=True),  # MATH, Minerva, NuminaMath-CoT
    Columns(("prompt",), "solution"),  # Big-Math-RL-Verified-Processed; DAPO's version also has reward_model
    Columns(("prompt",), "answer"),
    Columns(("prompt",), "label"),  # DAPO-Math-17k in slime's format
)
VERL = Columns(("prompt",), "reward_model")


def layout_of(row: Mapping[str, Any], where: str, columns: Columns | None = None) -> Columns:
    """``columns``, or if it is None the first layout that matches the row. Raises UnknownLayout."""
    layout = columns or next((known_layout for known_layout in (VERL, *LAYOUTS) if known_layout.fits(row)), None)
    if layout is None or not layout.fits(row):
        known = f"known layouts: {VERL}, {', '.join(map(str, LAYOUTS))}" if layout is None else f"expected {layout}"
        raise UnknownLayout(f"{where}: columns {', '.join(row) or 'none'}; {known}. The row: {example(row)}. {OPTIONS}")
    return layout


def read_problem(row: Mapping[str, Any], where: str, columns: Columns | None = None) -> tuple[str, str]:
    """The problem and ground truth of a row, from ``columns`` or by its layout.

    Strips known instructions around the problem. Raises NoTruth for a row without a ground truth,
    UnknownLayout for unknown columns, and DataError with row and column for other problems.
    """
    layout = layout_of(row, where, columns)
    require_text_only(row, where)
    parts = [_problem_text(row[name], f"{where}, column {name}") for name in layout.problem]
    problem = _filled("\n".join(parts), row.get("Numbers"))
    if row.get("context") and isinstance(row["context"], str):  # OlympiadBench
        problem = f"{row['context'].strip()}\n{problem}"
    try:
        if columns is None and (name := next((column for column in _CHOICES if row.get(column)), None)):
            raise NoTruth(f"{where}, column {name}: multiple choice, but the choices are not in the problem. {OPTIONS}")
        return problem, _truth(row[layout.answer], layout.answer, where, box=layout.box)
    except NoTruth as error:
        error.problem = problem
        raise


def other_roles(row: Mapping[str, Any], columns: Columns | None = None) -> set[str]:
    """The roles of a prompt's turns other than its last user turn; empty if it is not a list."""
    (name, *_) = layout_of(row, "", columns).problem
    turns = turns_in_text(row[name])
    if not is_tables(turns):
        return set()
    last = max((index for index, turn in enumerate(turns) if turn.get("role") == "user"), default=-1)
    return {str(turn.get("role")) for index, turn in enumerate(turns) if index != last}


def example(row: Mapping[str, Any]) -> str:
    """The first columns of a row with shortened values, for an error message."""
    shown = [f"{name} = {shortened(value)}" for name, value in islice(row.items(), EXAMPLE_COLUMNS)]
    left = len(row) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left > 0 else "")


def shortened(value: Any) -> str:
    """A value's repr, truncated to about a line."""
    text = f"{value!r:.{EXAMPLE_CHARS + 1}}"
    return text if len(text) <= EXAMPLE_CHARS else f"{text[:EXAMPLE_CHARS]}..."


def _problem_text(value: Any, where: str) -> str:
    """The problem in a column value: a string, or the last user turn of messages."""
    value = turns_in_text(value)
    if is_tables(value):
        users = [turn for turn in value if turn.get("role") == "user"]
        if not users or not isinstance(users[-1].get("content"), str):
            raise DataError(f"{where}: no user turn with text in {shortened(value)}")
        value = users[-1]["content"]
    if not isinstance(value, str) or not problem_of(value):
        raise DataError(f"{where}: the problem is {shortened(value)}, not text")
    return problem_of(value)


def turns_in_text(value: Any) -> Any:
    """Decode messages from a JSON string; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value:
        try:
            turns: Any = json.loads(value)
        except ValueError:
            return value
        return turns if is_tables(turns) and turns else value
    return value


def require_text_only(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row with images, video or audio, which no supported model reads."""
    if name := next((column for column in MEDIA if row.get(column) is not None and len(row[column])), None):
        raise DataError(f"{where}, column {name}: the row needs more than text, but models are trained on text only")


def _truth(value: Any, column: str, where: str, *, box: bool) -> str:
    where = f"{where}, column {column}"
    if column == "reward_model":
        if not is_table(value) or "ground_truth" not in value:
            raise DataError(f"{where}: no ground_truth in {shortened(value)}")
        return truth_text(value["ground_truth"], where)
    if value is None and column == "final_answer":
        raise NoTruth(f"{where}: the answer is a proof")
    if column == "final_answer" and isinstance(value, Sequence) and not isinstance(value, str):
        answers = cast("Sequence[Any]", value)
        if len(answers) != 1:
            raise NoTruth(f"{where}: {len(answers)} answers, not one")
        value = answers[0]
    truth = truth_text(value, where)
    if box:
        if not (answers := boxes(truth)):
            raise NoTruth(f"{where}: no \\boxed{{}} in the solution")
        return truth_text(answers[-1], where)
    if match := _GSM8K_ANSWER.search(truth):
        return match[1].replace(",", "")
    counted = _COUNTED.fullmatch(truth)
    return counted[1] if counted else truth


def _filled(problem: str, numbers: Any) -> str:
    values = numbers.split() if isinstance(numbers, str) else []

    def value(match: re.Match[str]) -> str:
        place = int(match[1])
        return values[place].removesuffix(".0") if place < len(values) else match[0]

    return _PLACE.sub(value, problem)


def _single(truth: Any) -> Any:
    """Unwrap a one-element list, also as JSON text (``["7"]``); return other values unchanged."""
    if isinstance(truth, str) and truth.strip()[:2] in ('["', "['"):
        try:
            values: Any = json.loads(truth)
        except ValueError:
            return truth
        is_single = isinstance(values, list) and len(cast("list[Any]", values)) == 1
        return _single(values) if is_single else truth
    if isinstance(truth, Sequence) and not isinstance(truth, str | bytes):
        several = cast("Sequence[Any]", truth)
        return _single(several[0]) if len(several) == 1 else several
    return truth


def truth_text(truth: Any, where: str) -> str:
    """A ground truth as text. Integral floats become integers: 12345678.0 becomes 12345678.

    Raises NoTruth for null or empty values, DataError for anything but text or a number.
    """
    truth = _single(truth)
    if isinstance(truth, bytes):
        try:
            truth = truth.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: the answer is {truth!r:.80}, bytes that are not text") from error
    if isinstance(truth, float) and math.isfinite(truth):
        truth = int(truth) if truth.is_integer() else repr(truth)
    if isinstance(truth, int) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str):
        message = f"{where}: the answer is {truth!r:.80}, neither text nor a number"
        raise NoTruth(message) if truth is None else DataError(message)
    if not truth.strip():
        raise NoTruth(f"{where}: the answer is empty")
    return truth.strip()
