"""Data files that one setting names together."""

from __future__ import annotations

from glob import glob, has_magic
from pathlib import Path

from retool_mcore.errors import DataError


def parquet_files(named: str) -> list[str]:
    """The files of a setting such as data.train_file, sorted by name.

    ``named``: a file, a folder of *.parquet files, or a pattern such as "data/part-*.parquet". A
    path that is not there is returned as it is, for whoever reads it to say so. Raises DataError
    for a folder or a pattern without files.
    """
    if Path(named).is_dir():
        found = sorted(str(path) for path in Path(named).glob("*.parquet"))
    elif has_magic(named) and not Path(named).exists():
        found = sorted(glob(named, recursive=True))
    else:
        return [named]
    if not found:
        raise DataError(f"{named}: no parquet file there. Name a file, a folder of them, or a pattern that fits some.")
    return found
