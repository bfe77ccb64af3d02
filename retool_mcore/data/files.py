"""Reads and writes data files. Errors name the file, row and column. Writes are atomic.

Reads a file, a folder or a Hugging Face data set: parquet, JSON (lines, or one document), CSV, and
the Arrow files of `save_to_disk`.
"""

# pyarrow has no types; this file annotates what it returns.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import contextlib
import csv
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from retool_mcore.config.base import is_table
from retool_mcore.config.files import is_hidden
from retool_mcore.errors import DataError
from retool_mcore.run import folder

ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".jsonl.gz", ".json.gz")
SPLITS = ("train", "test", "val", "validation", "dev")
BATCH_ROWS = 512
MAKERS = {"messages": "retool data sft", "reward_model": "retool data rl"}  # column -> command that writes it
DATASETS_METADATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # metadata files of `save_to_disk`
DATASETS_CACHE = "cache-"  # prefix of files with cached results of `map`, which `datasets` adds to such a folder
CORRUPT = cast("type[Exception]", pa.ArrowInvalid)
TYPE_ERRORS = (CORRUPT, cast("type[Exception]", pa.ArrowTypeError))

OnBad = Callable[[str, DataError], None]  # called with (where, error) for an unreadable row


# ------------------------------------------------------------------------------------ one file


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str]) -> Generator[None]:
    """Convert the libraries' exceptions for a missing or corrupt file to DataError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: text is not UTF-8: {error.reason}. Save the file as UTF-8.") from error
    except CORRUPT as error:
        kind = Path(path).suffix[1:]
        if kind in ("csv", "json", "jsonl"):  # a run was given a source
            raise DataError(
                f"{path}: not a parquet file. Convert it with `retool data rl` or `retool data sft`."
            ) from error
        raise DataError(f"{path}: not a complete {kind} file: {_reason(error)}{_remedy(error)}") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:  # pyarrow also raises OSError for corrupt pages
        raise DataError(f"{path}: cannot be read: {_reason(error)}{_remedy(error)}") from error


def read_rows(path: str | os.PathLike[str], columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 0, {column: value}) of a parquet file. Reads BATCH_ROWS at a time.

    Raises DataError if the file is missing, empty, truncated or not parquet, or lacks one of
    ``columns``.
    """
    index = -1
    with _reading(path), pq.ParquetFile(path) as file:
        names = cast("list[str]", file.schema_arrow.names)
        if missing := [column for column in columns if column not in names]:
            maker = next((f". `{MAKERS[column]}` writes such files" for column in missing if column in MAKERS), "")
            raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(names) or 'none'}{maker}")
        for index, row in _numbered(cast("Any", file).iter_batches(BATCH_ROWS, columns=list(columns))):
            yield index, row
    if index < 0:
        raise DataError(f"{path}: the file has no rows")


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of Arrow record batches, numbered from 0."""
    return enumerate(row for batch in batches for row in batch.to_pylist())


def column_names(path: str | os.PathLike[str]) -> list[str]:
    """The column names of a parquet file. Raises DataError like ``read_rows``."""
    with _reading(path):
        return list(cast("list[str]", pq.read_schema(path).names))


def read_file(path: str | os.PathLike[str], on_bad: OnBad | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of a file in one of the formats of ENDINGS.

    ``where``: the file and the row (from 0) or line (from 1). A file with an unknown suffix is read
    as JSON lines. Values of a CSV file are strings. ``on_bad``: see ``read_jsonl``. Raises
    DataError.
    """
    name = str(path)
    if name.endswith(".parquet"):
        rows = read_rows(path, column_names(path))
    elif name.endswith(".csv"):
        rows = _read_csv(path)
    elif name.endswith(".arrow"):
        rows = _read_arrow(path)
    else:
        yield from read_jsonl(path, on_bad)
        return
    yield from ((f"{path}, row {number}", row) for number, row in rows)


def _read_csv(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _reading(path), open(path, encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if None in row or None in row.values():
                raise DataError(f"{path}, row {number}: the number of fields differs from the file's first line")
            yield number, dict(row)


def _read_arrow(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    arrow = cast("Any", pa)
    with _reading(path), arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as reader:
        yield from _numbered(reader)


def read_jsonl(path: str | os.PathLike[str], on_bad: OnBad | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) of a JSON-lines file, optionally gzip-compressed.

    Skips blank lines. A .json file may instead contain a single list of objects, or one object,
    over many lines. ``where``: the file and the line from 1, or the row of a document from 0.
    Raises DataError for a missing file, invalid UTF-8, or a line that is not a JSON object. With
    ``on_bad``, bad lines go to it (where, error) instead, and reading continues.
    """
    is_gzip = str(path).endswith(".gz")
    with _reading(path), cast("BinaryIO", gzip.open(path)) if is_gzip else open(path, "rb") as file:
        if str(path).removesuffix(".gz").endswith(".json") and (objects := _document(file)) is not None:
            for number, row in enumerate(objects):
                where = f"{path}, row {number}"
                yield where, _table(row, where)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = _object(line, where)
            except DataError as error:
                if on_bad is None:
                    raise
                on_bad(where, error)
                continue
            yield where, row


def _document(file: BinaryIO) -> list[object] | None:
    """The objects of a JSON document (a list or one object); None for JSON lines or bad JSON."""
    first = next((line for line in file if line.strip()), b"")
    file.seek(0)
    try:
        if not first.lstrip().startswith(b"[") and is_table(json.loads(first)):
            return None
    except (ValueError, RecursionError):
        pass  # maybe the first line of a multi-line document
    try:
        document = json.load(file)
    except (ValueError, RecursionError):
        file.seek(0)
        return None  # read_jsonl reports the bad lines
    return cast("list[object]", document) if isinstance(document, list) else [document]


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if b"\\u" in line:  # only an escape can yield a lone surrogate, which UTF-8 cannot encode
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a text contains {error.object[error.start]!r}, half of a surrogate pair") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not JSON: the line is not UTF-8. Use a file of JSON lines") from error
    except (ValueError, RecursionError) as error:  # invalid JSON, a huge number or deep nesting
        raise DataError(f"{where}: not JSON: {error}") from error
    return _table(row, where)


def _table(row: Any, where: str) -> dict[str, Any]:
    if not is_table(row):
        raise DataError(f"{where}: {type(row).__name__}, not an object")
    return row


# ------------------------------------------------------------------- a folder or hub data set


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
            raise DataError(f"{source}: cannot be read: no such file")
        path = _download(source)
    inside = (file for file in path.rglob("*") if not is_hidden(file.relative_to(path)))
    files = sorted(file for file in inside if _is_data_file(file))
    chosen = [file for file in files if split is None or _has_split(split, str(file.relative_to(path)))]
    if not chosen:
        names = ", ".join(str(file.relative_to(path)) for file in files[:10]) or "none"
        wanted = f" of split {split!r}" if split else ""
        raise DataError(f"{source}: no data file{wanted} ({', '.join(ENDINGS)}); it has {names}")
    return chosen


def _is_data_file(file: Path) -> bool:
    if file.name in DATASETS_METADATA or (file.suffix == ".arrow" and file.name.startswith(DATASETS_CACHE)):
        return False
    return file.name.endswith(ENDINGS) and file.is_file()


def _has_split(split: str, name: str) -> bool:
    return split_of(name) == split if split in SPLITS else split in name


def split_of(name: str) -> str | None:
    """The last split name that occurs as a word in a file path: data/train-00000.parquet."""
    return next((word for word in reversed(re.split(r"[^a-z]+", name.lower())) if word in SPLITS), None)


def row_split(row: Mapping[str, Any]) -> str | None:
    """The split that a row names in verl's extra_info.split or in a column ``split``."""
    extra = row.get("extra_info")
    named = (extra.get("split") if is_table(extra) else None) or row.get("split")
    return named if isinstance(named, str) and named in SPLITS else None


def rows_of_split(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    wanted: str | None,
    *,
    unnamed: str | None = None,
    on_other: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows of the split ``wanted`` and rows without a split; call ``on_other`` for others.

    Yields all rows if ``wanted`` is None. ``unnamed``: the split of rows that name none; if it is
    None, they belong to any split. Raises DataError if the yielded rows have different splits.
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


def require_one_split(source: str, split: str | None = None) -> str | None:
    """The split in the names of a source's files; None if the names contain no split.

    Raises DataError if the files have different splits and ``split`` selects none.
    """
    files, path = source_files(source, split), Path(source)
    names = {str(file.relative_to(path)) if path.is_dir() else file.name for file in files}
    splits = {name: split_of(name) for name in sorted(names)}
    if split is None and len(set(splits.values())) > 1:
        listed = ", ".join(f"{name} ({of or 'no split'})" for name, of in list(splits.items())[:10])
        raise DataError(f"{source} has files of several splits: {listed}. Choose one with --split, or name a file")
    return next(iter(splits.values())) if split is None else split


def read_source(
    source: str, split: str | None = None, limit: int | None = None, on_bad: OnBad | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) from all files of a source; ``where`` is the file and the row or line.

    ``limit``: maximum number of rows. Raises DataError with file and row. With ``on_bad``,
    unreadable JSON lines go to it (where, error) instead, and reading continues. Rows of a CSV file
    and of a JSON document still raise.
    """
    rows = (row for file in source_files(source, split) for row in read_file(file, on_bad))
    empty = True
    for row in itertools.islice(rows, limit):
        empty = False
        yield row
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
            f"{name} is neither a local file or folder nor a data set that the hub provides: {reason[:300]}"
        ) from error


# ------------------------------------------------------------------------------------- writing


def write_parquet(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows atomically. Raises DataError for a column with values of different types."""
    try:
        table = cast("Any", pa.Table).from_pylist([dict(row) for row in rows])
    except TYPE_ERRORS as error:
        raise DataError(f"{path}: a column would have values of different types: {_reason(error)}") from error
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows atomically as JSON lines."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[Path]:
    """Like ``run.folder.replacing``, but raises DataError if the file cannot be written."""
    try:
        with folder.replacing(path) as draft:
            yield draft
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {_reason(error)}") from error


def _remedy(error: Exception) -> str:
    """A remedy for corrupt data; "" for an OS error such as a missing file."""
    return "" if getattr(error, "errno", None) else ". Make or copy the file again."


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)  # pyarrow's message would repeat the file name
    return os.strerror(number) if number else str(error).strip().split("\n", 1)[0].rstrip(".")
