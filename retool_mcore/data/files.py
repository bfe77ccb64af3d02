"""Reads and writes data files. Errors name the file, row and column. Writes are atomic."""

# pyarrow has no types; this file annotates what it returns.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import contextlib
import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from retool_mcore.config.base import is_table
from retool_mcore.errors import DataError
from retool_mcore.run import folder

ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".jsonl.gz", ".json.gz")
BATCH_ROWS = 512
MAKERS = {"messages": "retool data sft", "reward_model": "retool data rl"}  # column -> command that writes it
NOT_PARQUET = cast("type[Exception]", pa.ArrowInvalid)
NOT_ALIKE = (NOT_PARQUET, cast("type[Exception]", pa.ArrowTypeError))


def read_rows(path: str | os.PathLike[str], columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 0, {column: value}) of a parquet file. Reads BATCH_ROWS at a time.

    Raises DataError if the file is missing, empty, truncated or not parquet, or lacks one of
    ``columns``.
    """
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            names = cast("list[str]", file.schema_arrow.names)
            missing = [column for column in columns if column not in names]
            if missing:
                maker = next((f". `{MAKERS[column]}` makes such files" for column in missing if column in MAKERS), "")
                raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(names) or 'none'}{maker}")
            batches = cast("Iterator[Any]", file.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)))
            for batch in batches:
                rows: list[dict[str, Any]] = batch.to_pylist()
                for row in rows:
                    yield index, row
                    index += 1
    except NOT_PARQUET as error:
        raise DataError(_not_whole(path, error)) from error
    except OSError as error:  # pyarrow also raises it for corrupt pages
        after = f" after row {index - 1}" if index else ""
        raise DataError(f"{path}: cannot be read{after}: {_reason(error)}{_again(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {index} or later: text is not UTF-8: {error.reason}") from error
    if index == 0:
        raise DataError(f"{path}: the file has no rows")


def column_names(path: str | os.PathLike[str]) -> list[str]:
    """The column names of a parquet file. Raises DataError like ``read_rows``."""
    try:
        return list(cast("list[str]", pq.read_schema(path).names))
    except NOT_PARQUET as error:
        raise DataError(_not_whole(path, error)) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}") from error


def read_file(
    path: str | os.PathLike[str], on_bad: Callable[[str, DataError], None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of a parquet, JSON, CSV, or Arrow file (as `save_to_disk` writes it).

    ``where`` names the file and the row (from 0) or line (from 1). JSON may be gzip-compressed. A
    file with an unknown suffix is read as JSON lines. Values of a CSV file are strings. ``on_bad``:
    see ``read_jsonl``. Raises DataError.
    """
    name = str(path)
    if name.endswith(".parquet"):
        rows = read_rows(path, column_names(path))
    elif name.endswith(".csv"):
        rows = _read_csv(path)
    elif name.endswith(".arrow"):
        rows = _read_arrow(path)
    else:
        yield from ((f"{path}, line {number}", row) for number, row in read_jsonl(path, on_bad))
        return
    yield from ((f"{path}, row {number}", row) for number, row in rows)


def _read_csv(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file)):
                if None in row or None in row.values():
                    raise DataError(f"{path}, row {number}: it has not as many fields as the file's first line")
                yield number, dict(row)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: text is not UTF-8: {error.reason}. Save the file as UTF-8.") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}") from error


def _read_arrow(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    index = 0
    try:
        arrow = cast("Any", pa)
        with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as reader:
            for batch in reader:
                for row in batch.to_pylist():
                    yield index, row
                    index += 1
    except NOT_PARQUET as error:
        raise DataError(f"{path}: not a whole Arrow stream: {_reason(error)}{_again(error)}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}") from error


def read_jsonl(
    path: str | os.PathLike[str], on_bad: Callable[[str, DataError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSON-lines file, optionally gzip-compressed.

    Skips blank lines. A .json file may instead contain a single list of objects, or one object,
    over many lines; the numbers are then row numbers from 1. Raises DataError for a missing file,
    invalid UTF-8, or a line that is not a JSON object. With ``on_bad``, bad lines go to it (where,
    error) instead, and reading continues.
    """
    try:
        packed = str(path).endswith(".gz")
        with cast("BinaryIO", gzip.open(path)) if packed else open(path, "rb") as file:
            if str(path).removesuffix(".gz").endswith(".json") and (whole := _document(file)) is not None:
                for number, row in enumerate(whole, start=1):
                    yield number, _table(row, f"{path}, row {number}")
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
                yield number, row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {_reason(error)}") from error


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
        found = json.load(file)
    except (ValueError, RecursionError):
        file.seek(0)
        return None  # read_jsonl reports the bad lines
    return cast("list[object]", found) if isinstance(found, list) else [found]


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if b"\\u" in line:  # only an escape can yield a lone surrogate, which UTF-8 cannot encode
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a text holds {error.object[error.start]!r}, half a character") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not JSON: no text in UTF-8. JSON lines are read here") from error
    except (ValueError, RecursionError) as error:  # invalid JSON, a huge number or deep nesting
        raise DataError(f"{where}: not JSON: {error}") from error
    return _table(row, where)


def _table(row: Any, where: str) -> dict[str, Any]:
    if not is_table(row):
        raise DataError(f"{where}: {type(row).__name__}, not an object")
    return row


def write_parquet(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows atomically. Raises DataError for a column with values of different types."""
    try:
        table = cast("Any", pa.Table).from_pylist([dict(row) for row in rows])
    except NOT_ALIKE as error:
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


def _not_whole(path: str | os.PathLike[str], error: Exception) -> str:
    return f"{path}: not a whole parquet file: {_reason(error)}{_again(error)}"


def _again(error: Exception) -> str:
    """A remedy for corrupt data; "" for an OS error such as a missing file."""
    return "" if getattr(error, "errno", None) else ". Make or copy the file again."


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)  # pyarrow's message would repeat the file name
    return os.strerror(number) if number else str(error).strip().split("\n", 1)[0].rstrip(".")
