"""Problems to evaluate on, from parquet or JSON lines, in every layout that `data rl` reads."""

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
    """One problem; ``id`` is the number of its row or line, counted on through further files.

    ``messages``: the prompt's turns. ``text``: the bare problem, which each model is asked in its
    own format; None where the file itself has turns.
    """

    id: int
    messages: list[dict[str, Any]]
    truth: str
    text: str | None = None

    def asked_in(self, prompt_format: PromptFormat | None) -> "Problem":
        """The problem as a model of this format is asked; a prompt of the file's own stays."""
        if self.text is None or prompt_format is None:
            return self
        return replace(self, messages=prompt_format.messages(self.text))


def read_problems(paths: Sequence[Path], limit: int | None = None, columns: Columns | None = None) -> list[Problem]:
    """The first ``limit`` problems of files, of any layout of ``data.layouts`` or of ``columns``.

    Raises DataError naming file, row, column and rule.
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
    """A problem; one that is asked in turns, as in verl's schema, keeps its other turns."""
    try:
        problem, truth = read_problem(row, where, columns)
    except NoTruth as error:
        raise DataError(f"{error}. An answer is missing; `retool data rl` leaves such rows out") from error
    (asked, *others) = layout_of(row, where, columns).problem
    if not others and is_tables(turns := turns_in_text(row[asked])):
        return Problem(id=number, messages=messages_of(turns), truth=truth)
    return Problem(id=number, messages=PromptFormat().messages(problem), truth=truth, text=problem)
