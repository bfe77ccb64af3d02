"""Holds rows out of a data file for validation, by problem."""

import random
from collections import Counter
from typing import Any

from retool_mcore.data.layouts import Columns
from retool_mcore.data.leaks import normalised
from retool_mcore.data.lint import read_problem_rows
from retool_mcore.data.sources import read_source
from retool_mcore.data.spool import Spool
from retool_mcore.errors import DataError


def split_by_problem(source: str, hold_out: int, seed: int, columns: Columns | None = None) -> tuple[Spool, Spool]:
    """The rows to train on, and at least ``hold_out`` others; rows of one problem stay together.

    Problems are the same if their text is, but for case, spaces and known instructions. Which ones
    are held out depends on ``seed`` alone. Raises DataError when no row would be left to train on.
    """
    problems = [normalised(row.problem) for row in read_problem_rows(source, columns=columns)]
    rows_of = Counter(problems)
    order = sorted(rows_of)
    random.Random(seed).shuffle(order)
    held_out, count = set[str](), 0
    for problem in order:
        if count >= hold_out:
            break
        held_out.add(problem)
        count += rows_of[problem]
    if count >= len(problems):
        raise DataError(
            f"{source}: it has {len(problems)} rows of {len(rows_of)} problems, so holding {hold_out} rows out leaves "
            "none to train on. Hold fewer out"
        )
    parts = Spool(), Spool()
    rows: Any = (row for _, row in read_source(source))
    for problem, row in zip(problems, rows, strict=True):
        parts[problem in held_out].append(row)
    return parts
