"""Finds the data files that a setting names: one file, a folder or a pattern."""

from glob import glob, has_magic
from pathlib import Path

from retool_mcore.errors import DataError


def is_hidden(relative: str | Path) -> bool:
    """Whether a path in a data folder is hidden, such as ._x.parquet or .DS_Store."""
    return any(part.startswith(".") for part in Path(relative).parts)


def parquet_files(named: str) -> list[str]:
    """The files of a setting such as data.train_file, sorted by name.

    ``named``: a file, a folder of *.parquet files, or a pattern such as "data/part-*.parquet".
    Returns a missing file unchanged, for its reader to report. Raises DataError for a folder or a
    pattern without files.
    """
    if Path(named).is_dir():
        files = sorted(str(path) for path in Path(named).glob("*.parquet") if not is_hidden(path.name))
    elif has_magic(named) and not Path(named).exists():
        files = sorted(path for path in glob(named, recursive=True) if not is_hidden(Path(path).name))
    else:
        return [named]
    if not files:
        raise DataError(
            f"{named}: no parquet file found. Name a file, a folder of them, or a pattern that matches some."
        )
    return files
