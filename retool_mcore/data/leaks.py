"""Finds problems that two files share, by equal text or by common shingles (near duplicates).

A shingle is a sequence of five words or numbers. An inverted index from shingles to problems finds
near duplicates without comparing all pairs. Shingles in many problems are ignored, because they
come from instructions. Problems with equal words but different numbers are different problems.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SHINGLE_WORDS = 5
# Share of the shorter problem's shingles that a near duplicate has in common. GSM8K test and train,
# and AIME 24 and 25, have no pair from 0.3 to 0.9; pairs below 0.3 share only stock phrases.
# Within GSM8K train, 0.6 finds one repeat and two variants.
NEAR = 0.6
MIN_SHINGLES = 5  # minimum common shingles of a near duplicate; fewer may match by chance
COMMON_ROWS, COMMON_SHARE = 20, 0.002  # ignore shingles in more problems than both limits
SHOWN_CHARS = 70
_WORDS = re.compile(r"[^\W_]+", re.UNICODE)
_SPACING = re.compile(r"[\s$]+|\\[()\[\],;!]|\\(?:left|right)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    """A problem of the second file and the problem of the first file that it duplicates.

    ``score``: the share of the shorter problem's shingles that both have; 1 for equal texts.
    """

    first: str
    second: str
    score: float

    def describe(self) -> str:
        return f"{self.score:.0%}: {_short(self.second)!r} matches {_short(self.first)!r} in the first file"


class Index:
    """Index over the problems of one file, to look up problems of another."""

    def __init__(self, problems: Sequence[str]) -> None:
        texts = {normalised(problem): problem for problem in reversed(problems)}
        self._texts = texts
        self._problems = list(texts.values())
        self._shingles = [shingles(problem) for problem in self._problems]
        self._positions: dict[int, list[int]] = defaultdict(list)  # shingle -> problems that contain it
        for position, problem_shingles in enumerate(self._shingles):
            for shingle in problem_shingles:
                self._positions[shingle].append(position)
        most = max(COMMON_ROWS, COMMON_SHARE * len(self._problems))
        self._common = {shingle for shingle, positions in self._positions.items() if len(positions) > most}

    def find(self, problem: str) -> Pair | None:
        """The indexed problem that ``problem`` duplicates."""
        if (same := self._texts.get(normalised(problem))) is not None:
            return Pair(same, problem, 1.0)
        own = shingles(problem) - self._common
        shared = Counter(position for shingle in own for position in self._positions.get(shingle, ()))
        for position, count in shared.most_common():
            fewest = min(len(own), len(self._shingles[position] - self._common))
            if count < MIN_SHINGLES:
                break
            if count >= NEAR * fewest and _same_numbers(problem, self._problems[position]):
                return Pair(self._problems[position], problem, min(count / fewest, 0.999))
        return None


def shared_problems(first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """The problems of ``second`` that duplicate a problem of ``first``."""
    index = Index(first)
    return [pair for problem in second if (pair := index.find(problem)) is not None]


def normalised(problem: str) -> str:
    r"""Normalise a problem's text for comparison: case, spacing, delimiters, Unicode variants."""
    return _SPACING.sub("", unicodedata.normalize("NFKC", problem)).casefold()


def shingles(problem: str) -> set[int]:
    """Hashes of all sequences of five words, or of the whole text if it has fewer words."""
    words = [word.casefold() for word in _WORDS.findall(problem)]
    starts = range(max(len(words) - SHINGLE_WORDS, 0) + 1)
    return {hash(tuple(words[start : start + SHINGLE_WORDS])) for start in starts}


def _same_numbers(first: str, second: str) -> bool:
    """Whether the numbers of one text are a subset of the other's (as multisets)."""
    numbers, others = (Counter(re.findall(r"\d+", text)) for text in (first, second))
    return numbers <= others or others <= numbers


def _short(problem: str) -> str:
    text = " ".join(problem.split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
