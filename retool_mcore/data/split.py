"""Splits rows by problem: holds rows out for validation, and partitions a data set for SFT and RL.

A hash of the problem's text alone determines its part (SFT, RL, or RL validation). The part is
therefore the same in every command, for any order of rows and for every copy. A variant of a
problem is in the same part as its original.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from retool_mcore.data.files import read_source
from retool_mcore.data.layouts import Columns
from retool_mcore.data.leaks import normalised
from retool_mcore.data.lint import read_problem_rows
from retool_mcore.errors import DataError

Part = Literal["sft", "rl", "validation"]
ORIGINAL = "original_question"  # column of a variant with its original's text, which determines the part
SFT_SHARE = 0.5
VALIDATION_SHARE = 0.05  # of the problems that are not in SFT's part


def split_file(source: str, hold_out: int, seed: int, columns: Columns | None = None) -> tuple[list[Any], list[Any]]:
    """Split a source into training rows and at least ``hold_out`` held-out rows, by problem.

    Problems are equal if their texts are, ignoring case, spacing and known instructions. ``seed``
    selects the held-out problems. Raises DataError if no row would be left to train on.
    """
    problems = [row.problem for row in read_problem_rows(source, columns=columns)]
    parts = hold_out_rows(problems, [row for _, row in read_source(source)], hold_out, seed)
    if not parts[0]:
        raise DataError(
            f"{source}: it has {len(problems)} rows of {len(set(map(normalised, problems)))} problems, so holding out "
            f"{hold_out} rows leaves none to train on. Hold out fewer"
        )
    return parts


def hold_out_rows(problems: Sequence[str], rows: Sequence[Any], count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Split rows into training rows and at least ``count`` rows of randomly selected problems.

    ``problems``: the problem of each row.
    """
    keys = [normalised(problem) for problem in problems]
    sizes = Counter(keys)
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    held_out = set[str]()
    while order and count > 0:
        held_out.add(key := order.pop())
        count -= sizes[key]
    parts: tuple[list[Any], list[Any]] = [], []
    for key, row in zip(keys, rows, strict=True):
        parts[key in held_out].append(row)
    return parts


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
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    part: Part | None,
    sft_share: float = SFT_SHARE,
    columns: Sequence[str] = (),
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of one part; all rows if ``part`` is None.

    ``columns``: those that together state a row's problem. Without them, a row must have a text
    column ``question`` or ``problem``.
    """
    for where, row in rows:
        if part is None or part_of(_question(where, row, columns), sft_share) == part:
            yield where, row


def _question(where: str, row: Mapping[str, Any], columns: Sequence[str]) -> str:
    for names in ((ORIGINAL,), columns) if columns else ((ORIGINAL,), ("question",), ("problem",)):
        texts = [row.get(name) for name in names]
        if all(isinstance(text, str) for text in texts):
            return " ".join(map(str, texts))
    raise DataError(
        f"{where}: --part reads the text of {' and '.join(columns) or 'column question or problem'}; the row has "
        f"{', '.join(row) or 'no columns'}. Name its columns with --problem."
    )
