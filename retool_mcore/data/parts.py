r"""Which part of a training set a problem is in: SFT's, RL's, or RL's validation.

The part follows from a digest of the question alone, so that it is the same in every command, for
every order and for every copy. A variant of a problem is in the part of its original.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal

from retool_mcore.data.leaks import normalised
from retool_mcore.errors import DataError

Part = Literal["sft", "rl", "validation"]
ORIGINAL = "original_question"  # of a variant: the question that decides its part
SFT_SHARE = 0.5
VALIDATION_SHARE = 0.05  # of what SFT leaves


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
