"""Problems to evaluate on, from a parquet file of verl's schema or a JSON-lines file of question and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.data.rl import read_problem, truth_text
from retool_mcore.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem; ``id`` is its row's or line's number in the file."""

    id: int
    messages: list[dict[str, Any]]
    truth: str


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The first ``limit`` problems of a file. Raises DataError naming file, row, column and rule."""
    if path.suffix == ".parquet":
        rows = read_rows(path, ["prompt", "reward_model"])
        return [_of_verl(row, number, f"{path}, row {number}") for number, row in islice(rows, limit)]
    problems = [_of_line(row, number, f"{path}, line {number}") for number, row in islice(read_jsonl(path), limit)]
    if not problems:
        raise DataError(f"{path}: the file has no problems")
    return problems


def _of_line(row: Mapping[str, Any], number: int, where: str) -> Problem:
    if "prompt" in row and "reward_model" in row:
        return _of_verl(row, number, where)
    problem, truth = read_problem(row, where)
    return Problem(id=number, messages=[{"role": "user", "content": hermes_prompt(problem)}], truth=truth)


def _of_verl(row: Mapping[str, Any], number: int, where: str) -> Problem:
    """The prompt as it is, with its system turn."""
    turns, reward = row["prompt"], row["reward_model"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}, column prompt: {turns!r:.80} is no list of messages")
    if not isinstance(reward, dict):
        raise DataError(f"{where}, column reward_model: {reward!r:.80} holds no ground_truth")
    # Columnar files give every message every key.
    messages = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
    truth = truth_text(reward.get("ground_truth"), f"{where}, column reward_model")
    return Problem(id=number, messages=messages, truth=truth)
