"""Problems to evaluate on, from a parquet file of verl's schema or a JSON-lines file.

A line of a JSON-lines file holds a question and its answer, or a row of verl's schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.layouts import read_problem
from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.data.rl_prompts import messages_of, truth_of
from retool_mcore.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem; ``id`` is the number of its row or line, counted on through further files."""

    id: int
    messages: list[dict[str, Any]]
    truth: str


def read_problems(paths: Sequence[Path], limit: int | None = None) -> list[Problem]:
    """The first ``limit`` problems of files. Raises DataError naming file, row, column and rule."""
    problems: list[Problem] = []
    for path in paths:
        start = problems[-1].id + 1 if problems else 0
        left = None if limit is None else limit - len(problems)
        if left == 0:
            break
        problems += [replace(problem, id=start + problem.id) for problem in islice(_read_file(path), left)]
    return problems


def _read_file(path: Path) -> Iterator[Problem]:
    if path.suffix == ".parquet":
        for number, row in read_rows(path, ["prompt", "reward_model"]):
            yield _of_verl(row, number, f"{path}, row {number}")
        return
    number = 0
    for number, row in read_jsonl(path):
        yield _of_line(row, number, f"{path}, line {number}")
    if not number:
        raise DataError(f"{path}: the file has no problems")


def _of_line(row: Mapping[str, Any], number: int, where: str) -> Problem:
    if "prompt" in row and "reward_model" in row:
        return _of_verl(row, number, where)
    problem, truth = read_problem(row, where)
    return Problem(id=number, messages=[{"role": "user", "content": hermes_prompt(problem)}], truth=truth)


def _of_verl(row: Mapping[str, Any], number: int, where: str) -> Problem:
    """A problem from a row of verl's schema, with its system turn."""
    column = "prompt"
    try:
        messages = messages_of(row["prompt"])
        column = "reward_model"
        return Problem(id=number, messages=messages, truth=truth_of(row["reward_model"]))
    except DataError as error:
        raise DataError(f"{where}, column {column}: {error}") from error
