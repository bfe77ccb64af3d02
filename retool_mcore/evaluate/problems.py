"""Problems to evaluate on, from a parquet file of verl's schema or a JSON-lines file of question and answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.errors import DataError

# What holds the question, what the answer, in the JSON-lines files of the usual benchmarks.
FIELDS = (("problem", "answer"), ("Problem", "Answer"), ("question", "answer"), ("input", "output"))
GSM8K_MARK = "####"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem; ``id`` is its row's or line's number in the file."""

    id: int
    messages: list[dict[str, Any]]
    truth: str


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The first ``limit`` problems of a file. Raises DataError naming file, row and rule."""
    rows: Iterable[tuple[int, Mapping[str, Any]]]
    if path.suffix == ".parquet":
        rows = read_rows(path, ["prompt", "reward_model"])
        return [_of_verl(row, number, path) for number, row in islice(rows, limit)]
    problems = [_of_benchmark(row, number, path) for number, row in islice(read_jsonl(path), limit)]
    if not problems:
        raise DataError(f"{path}: the file has no problems")
    return problems


def _of_verl(row: Mapping[str, Any], number: int, path: Path) -> Problem:
    # Columnar files give every message every key.
    messages = [{key: value for key, value in message.items() if value is not None} for message in row["prompt"] or ()]
    if not messages:
        raise DataError(f"{path}, row {number}: the prompt has no messages")
    return Problem(
        id=number, messages=messages, truth=_truth((row["reward_model"] or {}).get("ground_truth"), number, path)
    )


def _of_benchmark(row: Mapping[str, Any], number: int, path: Path) -> Problem:
    for question, answer in FIELDS:
        if isinstance(row.get(question), str) and answer in row:
            messages = [{"role": "user", "content": hermes_prompt(row[question])}]
            return Problem(id=number, messages=messages, truth=_truth(row[answer], number, path))
    pairs = ", ".join(f"{question} and {answer}" for question, answer in FIELDS)
    raise DataError(f"{path}, line {number}: the keys {sorted(row)} hold none of the pairs {pairs}")


def _truth(value: object, number: int, path: Path) -> str:
    text = "" if value is None else str(value).rpartition(GSM8K_MARK)[2].strip()
    if not text:
        raise DataError(f"{path}, line {number}: the answer is empty")
    return text
