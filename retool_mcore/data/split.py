"""Which rows train and which do not: rows held out by problem, and the parts of a training set.

A problem's part (SFT's, RL's, or RL's validation) follows from a digest of its text alone, so it is
the same in every command, for every order and for every copy. A variant of a problem is in the part
of its original.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from retool_mcore.data.layouts import Columns
from retool_mcore.data.leaks import normalised
from retool_mcore.data.lint import read_problem_rows
from retool_mcore.data.sources import read_source
from retool_mcore.errors import DataError

Part = Literal["sft", "rl", "validation"]
ORIGINAL = "original_question"  # of a variant: the question that decides its part
SFT_SHARE = 0.5
VALIDATION_SHARE = 0.05  # of what SFT leaves


def split_file(source: str, hold_out: int, seed: int, columns: Columns | None = None) -> tuple[list[Any], list[Any]]:
    """The rows to train on, and at least ``hold_out`` others; rows of one problem stay together.

    Problems are the same if their text is, but for case, spaces and known instructions. Which ones
    are held out depends on ``seed`` alone. Raises DataError when no row would be left to train on.
    """
    problems = [normalised(row.problem) for row in read_problem_rows(source, columns=columns)]
    held_out = hold_out_problems(problems, hold_out, seed)
    if held_out >= set(problems):
        raise DataError(
            f"{source}: it has {len(problems)} rows of {len(held_out)} problems, so holding {hold_out} rows out leaves "
            "none to train on. Hold fewer out"
        )
    parts: tuple[list[Any], list[Any]] = [], []
    rows: Any = (row for _, row in read_source(source))
    for problem, row in zip(problems, rows, strict=True):
        parts[problem in held_out].append(row)
    return parts


def hold_out_problems(problems: Sequence[str], rows: int, seed: int) -> set[str]:
    """Problems with at least ``rows`` rows in all; ``problems`` has one for each row."""
    rows_of = Counter(problems)
    order = sorted(rows_of)
    random.Random(seed).shuffle(order)
    held_out, count = set[str](), 0
    while order and count < rows:
        held_out.add(problem := order.pop())
        count += rows_of[problem]
    return held_out


def part_of(question: str, sft_share: float = SFT_SHARE) -> Part:
    """The part of a question: ``sft_share`` of all is SFT's, a twentieth of the rest validation."""
    digest = blake2b(normalised(question).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < sft_share:
        return "sft"
    return "validation" if place < sft_share + VALIDATION_SHARE * (1 - sft_share) else "rl"


def rows_of_part(
    rows: Iterable[tuple[str, Mapping[str, Any]]], part: Part | None, sft_share: float = SFT_SHARE
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of one part, or all without one; rows hold a question, or a problem, as text."""
    for where, row in rows:
        if part is None or part_of(_question(where, row), sft_share) == part:
            yield where, row


def _question(where: str, row: Mapping[str, Any]) -> str:
    for name in (ORIGINAL, "question", "problem"):
        if isinstance(found := row.get(name), str):
            return found
    raise DataError(
        f"{where}: --part reads the text of column question or problem; the row has {', '.join(row) or 'no columns'}"
    )
