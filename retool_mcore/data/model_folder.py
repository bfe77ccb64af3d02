"""Writes a model folder that `retool data model` makes: complete or absent, and made once."""

import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retool_mcore.errors import CheckpointError


def is_made(directory: Path, mark: str, source: Mapping[str, Any]) -> bool:
    """Whether ``directory`` was made from ``source``, which its file ``mark`` records.

    Raises CheckpointError if it contains something else.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    file = directory / mark
    if file.is_file() and file.read_text(encoding="utf-8") == _text(source):
        return True
    raise CheckpointError(
        f"{directory} is not empty and was not made from {source}. It was not changed. Name another folder, or "
        "remove it."
    )


@contextmanager
def written_at_once(directory: Path, mark: str, source: Mapping[str, Any]) -> Generator[Path]:
    """Yield an empty folder that becomes ``directory``, with its mark, if the block succeeds."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    (partial / mark).write_text(_text(source), encoding="utf-8")
    if directory.exists():
        directory.rmdir()
    os.replace(partial, directory)


def _text(source: Mapping[str, Any]) -> str:
    return json.dumps(source, indent=2) + "\n"
