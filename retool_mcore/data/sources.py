"""Reads rows from a file, a folder or a Hugging Face data set, in the formats of files.py."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.config.files import is_hidden
from retool_mcore.data.files import ENDINGS, read_file
from retool_mcore.errors import DataError

OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")  # metadata files of `save_to_disk`
OF_ITS_CACHE = "cache-"  # prefix of files with cached results of `map`, which `datasets` adds to such a folder
SPLITS = ("train", "test", "val", "validation", "dev")

OnBad = Callable[[str, DataError], None]


def source_files(source: str, split: str | None = None) -> list[Path]:
    """The data files of a path or hub name, sorted by name.

    ``split``: only files whose path contains it. A hub name ("owner/name") is downloaded once, to
    the hub cache. Raises DataError if there is no data file.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        if path.name.endswith(ENDINGS):
            raise DataError(f"{source}: cannot be read: there is no such file")
        path = _download(source)
    inside = (file for file in path.rglob("*") if not is_hidden(file.relative_to(path)))
    files = sorted(file for file in inside if _holds_rows(file))
    chosen = [file for file in files if split is None or _is_of(split, str(file.relative_to(path)))]
    if not chosen:
        found = ", ".join(str(file.relative_to(path)) for file in files[:10]) or "none"
        wanted = f" of split {split!r}" if split else ""
        raise DataError(f"{source}: no data file{wanted} ({', '.join(ENDINGS)}); it has {found}")
    return chosen


def _holds_rows(file: Path) -> bool:
    if file.name in OF_DATASETS or (file.suffix == ".arrow" and file.name.startswith(OF_ITS_CACHE)):
        return False
    return file.name.endswith(ENDINGS) and file.is_file()


def _is_of(split: str, name: str) -> bool:
    return split_of(name) == split if split in SPLITS else split in name


def split_of(name: str) -> str | None:
    """The last split name that occurs as a word in a file path: data/train-00000.parquet."""
    return next((word for word in reversed(re.split(r"[^a-z]+", name.lower())) if word in SPLITS), None)


def row_split(row: Mapping[str, Any]) -> str | None:
    """The split that a row names in verl's extra_info.split or in a column ``split``."""
    extra = row.get("extra_info")
    said = (extra.get("split") if is_table(extra) else None) or row.get("split")
    return said if isinstance(said, str) and said in SPLITS else None


def rows_of_split(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    wanted: str | None,
    *,
    unnamed: str | None = None,
    on_other: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of split ``wanted`` and rows without a split; call ``on_other`` for others.

    Yield all rows if ``wanted`` is None. ``unnamed``: the split of rows that name none; None lets
    them join any split. Raises DataError if the yielded rows have different splits.
    """
    first: str | None = None
    for where, row in rows:
        own = row_split(row)
        if wanted in SPLITS and own not in (None, wanted):
            on_other()
            continue
        own = own or unnamed
        first = first or own
        if own is not None and own != first:
            raise DataError(f"{where}: a row of split {own!r} after rows of {first!r}. Choose one with --split")
        yield where, row


def one_split(source: str, split: str | None = None) -> str | None:
    """The split that the names of a source's files contain; None if they contain none.

    Raises DataError if the files have different splits and ``split`` selects none.
    """
    files, path = source_files(source, split), Path(source)
    names = {str(file.relative_to(path)) if path.is_dir() else file.name for file in files}
    found = {name: split_of(name) for name in sorted(names)}
    if split is None and len(set(found.values())) > 1:
        told = ", ".join(f"{name} ({of or 'no split'})" for name, of in list(found.items())[:10])
        raise DataError(f"{source} holds files of several splits: {told}. Choose one with --split, or name a file")
    return next(iter(found.values())) if split is None else split


def read_source(
    source: str,
    required: Sequence[str] = (),
    split: str | None = None,
    limit: int | None = None,
    on_bad: OnBad | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) from all files of a source; ``where`` is the file and the row or line.

    ``required``: columns that every row must have. ``limit``: maximum number of rows. Raises
    DataError with file, row and column. With ``on_bad``, unreadable rows go to it (where, error)
    instead, and reading continues.
    """
    yield from itertools.islice(_read_files(source, required, split, on_bad), limit)


def _read_files(
    source: str, required: Sequence[str], split: str | None, on_bad: OnBad | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    empty = True
    for file in source_files(source, split):
        for where, row in read_file(file, on_bad):
            missing = [column for column in required if column not in row]
            empty = False
            if not missing:
                yield where, row
                continue
            error = DataError(f"{where}: no column {', '.join(missing)}; it has {', '.join(row) or 'none'}")
            if on_bad is None:
                raise error
            on_bad(where, error)
    if empty:
        raise DataError(f"{source}: no rows")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  a bare dict in it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{ending}" for ending in ENDINGS]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise DataError(
            f"{name} is neither a file or folder here nor a data set that the hub gives: {reason[:300]}"
        ) from error
