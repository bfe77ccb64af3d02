"""Writes a run's checkpoints, marks them complete, and deletes old ones.

Keeps the newest ``checkpoint.keep`` and the best. run/checkpoint.py describes their contents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from retool_mcore.config import RunConfig
from retool_mcore.errors import CheckpointError
from retool_mcore.run.best import read_best
from retool_mcore.run.checkpoint import (
    STATE_FILE,
    SUMS,
    VERSION,
    collect_checksums,
    complete_checkpoints,
    identity,
    layout,
    read_state,
    remove_checkpoint,
    set_aside,
    step_folders,
)
from retool_mcore.run.folder import explain_full_disk, is_full, write_whole

DISK_FULL = "Its files were deleted; the checkpoint before it is kept. Free some, then run the same command again."


class Pending(Protocol):
    """A save whose files are still being written; see verl/checkpoint.py."""

    def ended(self) -> bool: ...
    def finish(self) -> None: ...
    def kill(self) -> None: ...


def step_folder(config: RunConfig, step: int) -> Path:
    return config.run.dir / "checkpoints" / f"global_step_{step}"


def publish(config: RunConfig, step: int) -> None:
    """Mark ``step_folder(step)`` complete, then delete all but the newest ``checkpoint.keep``.

    The best complete checkpoint is kept as well. A checkpoint still being written does not count
    as the best, because a kill may destroy it.
    """
    path = step_folder(config, step) / STATE_FILE
    files = collect_checksums(path.parent)
    shutil.rmtree(path.parent / SUMS, ignore_errors=True)
    state = {
        "version": VERSION,
        "step": step,
        "identity": identity(config),
        "settings": config.model_dump(),
        "layout": layout(config),
        "reshardable": config.checkpoint.reshardable,
        "files": files,
    }
    write_whole(path, json.dumps(state, indent=2))
    found, best = complete_checkpoints(path.parent.parent), read_best(config.run.dir)
    best_step = best.step(last=found[-1].step) if best else None
    for old in found[: -config.checkpoint.keep]:
        if old.step != best_step:
            remove_checkpoint(old.path)


def delete_incomplete(config: RunConfig) -> None:
    """Delete interrupted saves. The caller must hold the run's lock (folder.lock_run)."""
    for path in step_folders(config.run.dir / "checkpoints").values():
        if not (path / STATE_FILE).is_file():
            remove_checkpoint(path)


class Saver:
    """Writes and publishes the checkpoints of a run, with at most one save in flight.

    ``write(folder, step)`` returns a ``Pending`` asynchronous save, or None when everything is on
    disk. In SFT, ``write`` and all methods are collective: every rank calls them with the same
    arguments. In RL, one process calls them for all ranks. Leaving the ``with`` block completes the
    save in flight; after an error, it kills that save.
    """

    def __init__(
        self,
        config: RunConfig,
        write: Callable[[str, int], Pending | None],
        *,
        rank: int = 0,
        barrier: Callable[[], object] = lambda: None,
    ) -> None:
        self._config, self._write, self._rank, self._barrier = config, write, rank, barrier
        self._in_flight: tuple[int, Pending] | None = None
        self.begun = 0  # step of the last save, complete or in flight

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._in_flight is not None:
            self._in_flight[1].kill()

    @property
    def busy(self) -> bool:
        return self._in_flight is not None

    def save(self, step: int) -> None:
        """Wait for the save in flight, then start saving ``step``."""
        self.wait()
        self.begun = step
        folder = step_folder(self._config, step)
        if self._rank == 0:
            _make_room(folder, step)
        self._barrier()
        with self._writing(step):
            pending = self._write(str(folder / "actor"), step)
        if pending is None:
            self._publish(step)
        else:
            self._in_flight = (step, pending)

    def describe_kept(self) -> str:
        """Return a sentence for the user of a run that stops early: which step is saved."""
        found = complete_checkpoints(self._config.run.dir / "checkpoints")
        if not found:
            return "no checkpoint is kept, and the same command starts from the beginning"
        return f"step {found[-1].step} is saved, and the same command resumes after it"

    def poll(self) -> None:
        """Publish the checkpoint in flight if all of its files are written."""
        if self._in_flight is not None and self._in_flight[1].ended():
            self.wait()

    def wait(self) -> None:
        if self._in_flight is None:
            return
        step, pending = self._in_flight
        with self._writing(step):
            pending.finish()
        self._in_flight = None
        self._publish(step)

    def _publish(self, step: int) -> None:
        self._barrier()
        if self._rank == 0:
            with self._writing(step):
                publish(self._config, step)
        self._barrier()

    @contextmanager
    def _writing(self, step: int) -> Generator[None]:
        """On a full disk, delete the incomplete checkpoint to free space."""
        folder = step_folder(self._config, step)
        with explain_full_disk(folder, DISK_FULL):
            try:
                yield
            except Exception as error:
                if self._rank == 0 and is_full(error) and not (folder / STATE_FILE).exists():
                    with suppress(OSError):  # another rank may still write there
                        remove_checkpoint(folder)
                raise


def _make_room(folder: Path, step: int) -> None:
    """Create an empty checkpoint folder; rename an existing checkpoint that is not the run's."""
    try:
        own = not (folder / STATE_FILE).exists() or read_state(folder).step == step
    except CheckpointError:
        own = False
    if not own:
        set_aside(folder, "found")
    remove_checkpoint(folder)
    folder.mkdir(parents=True, exist_ok=True)
