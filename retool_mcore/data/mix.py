"""Mixes several training files into one, by weight. A seed selects and shuffles the rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from retool_mcore.data.files import column_names, read_rows, write_parquet
from retool_mcore.data.sources import one_split, row_split, source_files
from retool_mcore.errors import DataError

# Required columns of a training file.
KINDS = {"sft": ("messages", "tools"), "rl": ("data_source", "prompt", "reward_model")}


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
    name, sign, said = text.rpartition("=")
    if not sign or Path(text).exists():
        return text, Fraction(1)
    try:
        weight = Fraction(said)
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"{text}: {said!r} is no weight. Sources are given as PATH=WEIGHT, such as a.parquet=0.7"
        ) from error
    if weight <= 0:
        raise DataError(f"{text}: a weight is above 0; leave the source out instead")
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
        columns = column_names(file)
        if not any(set(needed) <= set(columns) for needed in KINDS.values()):
            raise DataError(
                f"{file}: columns {', '.join(columns)}; SFT reads {', '.join(KINDS['sft'])} and RL "
                f"{', '.join(KINDS['rl'])}. `retool data sft` and `retool data rl` write them"
            )
        rows += [row for _, row in read_rows(file, columns)]
    return MixSource(name, weight, rows)


def _require_one_kind(sources: Sequence[MixSource]) -> None:
    """Raise DataError if the sources mix SFT with RL rows, or rows of different splits."""
    kinds = {
        kind for source in sources for row in source.rows for kind, needed in KINDS.items() if row.keys() >= set(needed)
    }
    if len(kinds) > 1:
        raise DataError(f"files for {' and '.join(sorted(kinds))} do not mix: {', '.join(s.name for s in sources)}")
    splits: dict[str, str] = {}
    for source in sources:
        for split in {row_split(row) for row in source.rows} - {None}:
            splits.setdefault(str(split), source.name)
    if len(splits) > 1:
        (first, of), (second, other), *_ = splits.items()
        raise DataError(f"{other}: rows of split {second!r} among rows of {first!r} ({of}). Mix each split by itself")


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
