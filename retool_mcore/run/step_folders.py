"""Which folders of ``checkpoints/``, and which of their contents, a run has written.

Only these are counted, resumed from and deleted. A user's copy, as ``global_step_8_keep``, and a
user's notes beside our files stay as they are.
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
    """The folders that have a checkpoint's name, whole or not, by step in ascending order."""
    named = {int(found[1]): path for path in checkpoints.glob("*") if (found := _NAME.fullmatch(path.name))}
    return {step: named[step] for step in sorted(named) if named[step].is_dir()}


def remove(folder: Path) -> None:
    """Delete what a run wrote into ``folder``, and the folder if nothing else is in it."""
    for name in CONTENTS:  # the state first: a half-deleted folder must not look complete
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def set_aside(folder: Path, why: str) -> Path:
    """Rename ``folder`` to one that no run counts or deletes: ``global_step_8.damaged``."""
    aside = folder.with_name(f"{folder.name}.{why}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{why}{number}")
    return folder.rename(aside)


def files_of(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint, but for those that describe the others."""
    for name in CONTENTS:
        if name in (STATE_FILE, SUMS):
            continue
        path = folder / name
        yield from (each for each in (path, *path.rglob("*")) if each.is_file())
