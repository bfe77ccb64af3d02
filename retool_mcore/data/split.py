"""Splits and mixes data files.

- ``split_file`` holds problems out for validation.
- ``rows_of_part`` partitions a data set for SFT, RL and RL validation. A hash of the problem's text
  alone determines its part, so the part is the same in every command, for any order of rows and for
  every copy. A variant of a problem is in the same part as its original.
- ``mix`` writes one training file from several, by weight.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retool_mcore.data.files import (
    column_names,
    one_split,
    read_rows,
    read_source,
    rows_of_split,
    source_files,
    write_parquet,
)
from retool_mcore.data.layouts import Columns
from retool_mcore.data.leaks import normalised
from retool_mcore.data.lint import read_problem_rows
from retool_mcore.errors import DataError

Part = Literal["sft", "rl", "validation"]
ORIGINAL = "original_question"  # column of a variant with its original's text, which determines the part
SFT_SHARE = 0.5
VALIDATION_SHARE = 0.05  # of the problems that are not in SFT's part
# Required columns of a training file that ``mix`` reads.
KINDS = {"sft": ("messages", "tools"), "rl": ("data_source", "prompt", "reward_model")}


def split_file(source: str, hold_out: int, seed: int, columns: Columns | None = None) -> tuple[list[Any], list[Any]]:
    """Split a source into training rows and at least ``hold_out`` held-out rows, by problem.

    Problems are equal if their texts are, ignoring case, spacing and known instructions. ``seed``
    selects the held-out problems. Raises DataError if no row would be left to train on.
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
    """Select random problems with at least ``rows`` rows in total.

    ``problems``: the problem of each row.
    """
    rows_of = Counter(problems)
    order = sorted(rows_of)
    random.Random(seed).shuffle(order)
    held_out, count = set[str](), 0
    while order and count < rows:
        held_out.add(problem := order.pop())
        count += rows_of[problem]
    return held_out


def part_of(question: str, sft_share: float = SFT_SHARE) -> Part:
    """The part of a question, by its hash.

    SFT gets ``sft_share`` of all questions, validation VALIDATION_SHARE of the rest, RL the others.
    """
    digest = blake2b(normalised(question).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < sft_share:
        return "sft"
    return "validation" if place < sft_share + VALIDATION_SHARE * (1 - sft_share) else "rl"


def rows_of_part(
    rows: Iterable[tuple[str, Mapping[str, Any]]], part: Part | None, sft_share: float = SFT_SHARE
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of one part; all rows if ``part`` is None.

    A row must have a text column ``question`` or ``problem``.
    """
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


@dataclass(frozen=True)
class MixSource:
    """A source of the mix. ``taken``: the number of rows that the mix takes from it."""

    name: str
    weight: Fraction
    rows: Sequence[dict[str, Any]]
    taken: int = 0

    def describe(self) -> str:
        times = self.taken / len(self.rows)
        return f"{self.name}: {self.taken} of the rows, from {len(self.rows)} ({times:.2f} times each)"


def parse_source(text: str) -> tuple[str, Fraction]:
    """Parse PATH=WEIGHT into name and weight; the default weight is 1. Raises DataError."""
    name, sign, number = text.rpartition("=")
    if not sign or Path(text).exists():
        return text, Fraction(1)
    try:
        weight = Fraction(number)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        raise DataError(f"{text}: {number!r} is not a weight above 0. Name a source as PATH=WEIGHT: a.parquet=0.7")
    return name, weight


def mix(
    sources: Sequence[tuple[str, Fraction]], out: Path, *, rows: int | None = None, seed: int = 0
) -> list[MixSource]:
    """Write a mix of ``rows`` rows from ``sources`` (name, weight) to the parquet file ``out``.

    By default, the mix is as large as the weights allow without repeating a row. A larger mix
    repeats a source's rows evenly: their counts differ by at most 1. The same seed gives the same
    file. Raises DataError for files of different splits or kinds (SFT, RL).
    """
    if len(sources) < 2:
        raise DataError(f"{len(sources)} source: a mix has two or more, each as PATH=WEIGHT")
    opened = _shares([_open(name, weight) for name, weight in sources], rows)
    _require_one_kind(opened)
    draw = np.random.RandomState(seed)
    taken: list[dict[str, Any]] = []
    for source in opened:
        epochs, extra = divmod(source.taken, len(source.rows))
        taken += [*source.rows] * epochs
        taken += [source.rows[int(number)] for number in draw.permutation(len(source.rows))[:extra]]
    columns = list(dict.fromkeys(name for row in taken for name in row))
    write_parquet(
        out, [{name: taken[int(number)].get(name) for name in columns} for number in draw.permutation(len(taken))]
    )
    return opened


def _open(name: str, weight: Fraction) -> MixSource:
    one_split(name)
    rows: list[dict[str, Any]] = []
    for file in source_files(name):
        if file.suffix != ".parquet":
            raise DataError(f"{file}: a mix reads parquet, as `retool data sft` and `retool data rl` write it")
        rows += [row for _, row in read_rows(file, column_names(file))]
    return MixSource(name, weight, rows)


def _require_one_kind(sources: Sequence[MixSource]) -> None:
    """Raise DataError if the sources mix SFT with RL rows, or rows of different splits."""
    kinds: dict[str, str] = {}
    for source in sources:
        columns = source.rows[0].keys()
        kind = next((kind for kind, needed in KINDS.items() if columns >= set(needed)), None)
        if kind is None:
            raise DataError(
                f"{source.name}: columns {', '.join(columns)}; SFT reads {', '.join(KINDS['sft'])} and RL "
                f"{', '.join(KINDS['rl'])}. `retool data sft` and `retool data rl` write them"
            )
        kinds[kind] = source.name
    if len(kinds) > 1:
        raise DataError(f"{kinds['sft']} is for SFT and {kinds['rl']} for RL. Mix each kind by itself")
    for _ in rows_of_split(((source.name, row) for source in sources for row in source.rows), None):
        pass  # raises for rows of different splits


def _shares(sources: Sequence[MixSource], rows: int | None) -> list[MixSource]:
    """Apportion rows by weight, with the largest-remainder method."""
    total = sum((source.weight for source in sources), Fraction(0))
    shares = [source.weight / total for source in sources]
    wanted = rows or int(min(len(source.rows) / share for source, share in zip(sources, shares, strict=True)))
    exact = [share * wanted for share in shares]
    taken = [int(each) for each in exact]
    by_remainder = sorted(range(len(sources)), key=lambda i: taken[i] - exact[i])
    for i in by_remainder[: wanted - sum(taken)]:
        taken[i] += 1
    if 0 in taken:
        poor = sources[taken.index(0)]
        raise DataError(f"{poor.name}: no row of {wanted} is left for its weight {poor.weight}. Raise it, or --rows")
    return [replace(source, taken=count) for source, count in zip(sources, taken, strict=True)]
