"""Reads evaluation problems from data files, in every layout that `retool data rl` supports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_tables
from retool_mcore.data.files import read_file
from retool_mcore.data.layouts import Columns, NoTruth, layout_of, read_problem, turns_in_text
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.rl_prompts import messages_of
from retool_mcore.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    ``id``: its row or line number, continued across files. ``messages``: the prompt. ``text``: the
    plain problem, to render in each model's prompt format; None if the file contains messages.
    """

    id: int
    messages: list[dict[str, Any]]
    truth: str
    text: str | None = None

    def in_format(self, prompt_format: PromptFormat | None) -> "Problem":
        """The problem in a model's prompt format. A prompt from the file stays unchanged."""
        if self.text is None or prompt_format is None:
            return self
        return replace(self, messages=prompt_format.messages(self.text))


def read_problems(paths: Sequence[Path], limit: int | None = None, columns: Columns | None = None) -> list[Problem]:
    """The first ``limit`` problems of the files, in any layout of ``data.layouts`` or ``columns``.

    Raises DataError with file, row, column and rule.
    """
    problems: list[Problem] = []
    for path in paths:
        start = problems[-1].id + 1 if problems else 0
        left = None if limit is None else limit - len(problems)
        if left == 0:
            break
        read = _read_file(path, columns)
        problems += [replace(problem, id=start + problem.id) for problem in islice(read, left)]
    return problems


def _read_file(path: Path, columns: Columns | None) -> Iterator[Problem]:
    number = -1
    for number, (where, row) in enumerate(read_file(path)):
        yield _problem(row, number, where, columns)
    if number < 0:
        raise DataError(f"{path}: the file has no problems")


def _problem(row: Mapping[str, Any], number: int, where: str, columns: Columns | None) -> Problem:
    """A problem from a row. A prompt of messages, as in verl's schema, keeps all its turns."""
    try:
        problem, truth = read_problem(row, where, columns)
    except NoTruth as error:
        raise DataError(f"{error}. The row has no usable answer; `retool data rl` leaves such rows out") from error
    (column, *others) = layout_of(row, where, columns).problem
    if not others and is_tables(turns := turns_in_text(row[column])):
        return Problem(id=number, messages=messages_of(turns), truth=truth)
    return Problem(id=number, messages=PromptFormat().messages(problem), truth=truth, text=problem)
