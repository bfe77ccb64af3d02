"""One training file from several, by weight; files that do not fit memory are read in pieces.

Each source gives its share of the rows, in its own order; which source is next is drawn. Training
shuffles what it reads, so the order within a source says nothing.
"""

# pyarrow has no types; what it returns is annotated here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from retool_mcore.data.files import NOT_PARQUET, column_names, read_rows, replacing, table_of
from retool_mcore.data.sources import one_split, row_split, source_files
from retool_mcore.errors import DataError

# What a training file must have: SFT's, RL's.
KINDS = {"sft": ("messages", "tools"), "rl": ("data_source", "prompt", "reward_model")}
ROWS_AT_ONCE = 1024
NOT_ALIKE = (NOT_PARQUET, cast("type[Exception]", pa.ArrowTypeError))


@dataclass(frozen=True)
class MixSource:
    """A source of the mix: its files, its number of rows, and how many of them it gives."""

    name: str
    weight: Fraction
    files: tuple[Path, ...]
    rows: int
    taken: int = 0

    def describe(self) -> str:
        times = self.taken / self.rows
        return f"{self.name}: {self.taken} of the rows, from {self.rows} ({times:.2f} times each)"


def parse_source(text: str) -> tuple[str, Fraction]:
    """Name and weight from PATH=WEIGHT; a PATH alone has weight 1. Raises DataError."""
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
    """Write ``rows`` rows of ``sources`` (name, weight), as SFT or RL reads them, to ``out``.

    Without ``rows`` there are as many as the weights allow with no row twice. With more, rows of a
    source come again, none more than once oftener than another. The same seed gives the same file.
    Raises DataError for files of several splits or kinds.
    """
    if len(sources) < 2:
        raise DataError(f"{len(sources)} source: a mix has two or more, each as PATH=WEIGHT")
    opened = _shares([_open(name, weight) for name, weight in sources], rows)
    schema = _schema(opened)
    draw = np.random.RandomState(seed)
    streams = [_rows_of(source, draw, schema.names) for source in opened]
    order: np.ndarray = draw.permutation(np.repeat(np.arange(len(opened)), [source.taken for source in opened]))
    rows_in_order = _of_one_split(next(streams[int(i)]) for i in order)
    with replacing(out) as draft, pq.ParquetWriter(draft, schema) as writer:
        while batch := list(islice(rows_in_order, ROWS_AT_ONCE)):
            writer.write_table(table_of(batch, schema))
    return opened


def _open(name: str, weight: Fraction) -> MixSource:
    one_split(name)
    files = tuple(source_files(name))
    if strange := [file for file in files if file.suffix != ".parquet"]:
        raise DataError(f"{strange[0]}: a mix reads parquet, as `retool data sft` and `retool data rl` write it")
    for file in files:
        columns = column_names(file)
        if not any(set(needed) <= set(columns) for needed in KINDS.values()):
            raise DataError(
                f"{file}: columns {', '.join(columns)}; SFT reads {', '.join(KINDS['sft'])} and RL "
                f"{', '.join(KINDS['rl'])}. `retool data sft` and `retool data rl` write them"
            )
    rows = sum(cast("int", pq.read_metadata(file).num_rows) for file in files)
    if not rows:
        raise DataError(f"{name}: no rows")
    return MixSource(name, weight, files, rows)


def _shares(sources: Sequence[MixSource], rows: int | None) -> list[MixSource]:
    """Deal the rows by weight; what rounding leaves goes to the largest remainders."""
    total = sum((source.weight for source in sources), Fraction(0))
    shares = [source.weight / total for source in sources]
    wanted = rows or int(min(source.rows / share for source, share in zip(sources, shares, strict=True)))
    exact = [share * wanted for share in shares]
    taken = [int(each) for each in exact]
    by_remainder = sorted(range(len(sources)), key=lambda i: taken[i] - exact[i])
    for i in by_remainder[: wanted - sum(taken)]:
        taken[i] += 1
    if 0 in taken:
        poor = sources[taken.index(0)]
        raise DataError(f"{poor.name}: no row of {wanted} is left for its weight {poor.weight}. Raise it, or --rows")
    return [replace(source, taken=count) for source, count in zip(sources, taken, strict=True)]


def _schema(sources: Sequence[MixSource]) -> Any:
    """The schema that holds the rows of all files; SFT and RL do not mix."""
    schemas = [(file, cast("Any", pq.read_schema(file))) for source in sources for file in source.files]
    kinds = {kind for _, schema in schemas for kind, needed in KINDS.items() if set(needed) <= set(schema.names)}
    if not any(all(set(needed) <= set(schema.names) for _, schema in schemas) for needed in KINDS.values()):
        raise DataError(f"files for {' and '.join(sorted(kinds))} do not mix: {', '.join(s.name for s in sources)}")
    try:
        return cast("Any", pa).unify_schemas(
            [schema.remove_metadata() for _, schema in schemas], promote_options="permissive"
        )
    except NOT_ALIKE as error:
        raise DataError(
            f"the columns of {', '.join(s.name for s in sources)} are of different types: {error}"
        ) from error


def _rows_of(
    source: MixSource, draw: np.random.RandomState, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows (where, row) that a source gives: as often as all of them fit, then a drawn part."""
    epochs, extra = divmod(source.taken, source.rows)
    is_drawn = np.zeros(source.rows, dtype=bool)
    is_drawn[draw.permutation(source.rows)[:extra]] = True
    for epoch in range(epochs + bool(extra)):
        number = 0
        for file in source.files:
            there = column_names(file)
            for index, row in read_rows(file, [each for each in columns if each in there]):
                if epoch < epochs or is_drawn[number]:
                    yield f"{file}, row {index}", row
                number += 1


def _of_one_split(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    split: str | None = None
    for where, row in rows:
        own = row_split(row)
        split = split or own
        if own not in (None, split):
            raise DataError(f"{where}: a row of split {own!r} among rows of {split!r}. Mix each split by itself")
        yield row
