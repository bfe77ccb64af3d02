"""Identifies the folders in ``checkpoints/``, and the files in them, that a run has written.

A run counts, resumes from and deletes only these. It does not touch a user's copy such as
``global_step_8_keep`` or other files that a user put there.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STATE_FILE = "state.json"
SUMS = "checksums"
CONTENTS = (STATE_FILE, SUMS, "actor", "critic", "data.pt", "transfer_queue")
_NAME = re.compile(r"global_step_([1-9][0-9]*)")


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Return the folders named ``global_step_N``, complete or not, by step in ascending order."""
    named = {int(found[1]): path for path in checkpoints.glob("*") if (found := _NAME.fullmatch(path.name))}
    return {step: named[step] for step in sorted(named) if named[step].is_dir()}


def remove(folder: Path) -> None:
    """Delete the files that a run wrote into ``folder``, and the folder if it is then empty."""
    for name in CONTENTS:  # state.json first: a half-deleted folder must not look complete
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def set_aside(folder: Path, why: str) -> Path:
    """Rename ``folder`` so that runs ignore it, for example to ``global_step_8.damaged``."""
    aside = folder.with_name(f"{folder.name}.{why}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{why}{number}")
    return folder.rename(aside)


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, except state.json and recorded checksums."""
    for name in CONTENTS:
        if name in (STATE_FILE, SUMS):
            continue
        path = folder / name
        yield from (each for each in (path, *path.rglob("*")) if each.is_file())
