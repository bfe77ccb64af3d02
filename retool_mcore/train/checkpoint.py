"""Checkpoints of a run: complete or absent, the newest few kept.

    <run>/checkpoints/global_step_50/
        actor/model/huggingface/   weights in Hugging Face's layout, written by the bridge: what `retool export` copies
        actor/optimizer/dist_ckpt/ Adam moments, float32 main weights and the schedule, sharded by Megatron
        actor/extra/dist_ckpt/     random states of every rank
        data.pt                    RL only: where verl's data loader stands (SFT's position is the step itself)
        state.json                 the step, the identity of the run; written last, so its presence means complete

The layout is verl's, so that its own tools read our checkpoints. A folder without state.json is what a kill left
behind: never resumed from, overwritten by the next save of that step. A kill at any moment leaves the previous
checkpoint valid.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.errors import CheckpointError

STATE_FILE = "state.json"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    identity: dict[str, Any]


def identity(config: RunConfig) -> dict[str, Any]:
    """What must not change between a save and its resume for the run to continue as if it had not been stopped."""
    constant = config.optim.schedule == "constant" and not config.optim.warmup_fraction
    shared = {
        "model": config.model.model_dump(),
        "parallel": config.parallel.model_dump(),
        "optim": config.optim.model_dump(),
        "steps": None if constant else config.num_steps,  # the schedule is stretched over them
        "dp": config.dp,
        "seed": config.run.seed,
    }
    if isinstance(config, SftConfig):
        keys = {"global_batch": config.train.global_batch, "max_length_tokens": config.data.max_length_tokens}
        return shared | keys | {"train_file": config.data.train_file}
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    keys = {"prompts_per_step": config.train.prompts_per_step, "group_size": config.rollout.group_size}
    roles = {"tool": config.rollout.tool, "algorithm": config.algorithm.name}  # PPO saves a critic, too
    return shared | keys | roles | {"train_file": config.data.train_file}


def complete_checkpoints(folder: Path) -> list[Saved]:
    """All complete checkpoints under a ``checkpoints`` folder, oldest first."""
    found = [_read(path) for path in folder.glob("global_step_*") if (path / STATE_FILE).is_file()]
    return sorted(found, key=lambda saved: saved.step)


def _read(path: Path) -> Saved:
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return Saved(step=int(state["step"]), path=path, identity=state["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE} is not a checkpoint's state ({error}). Move the folder {path} away to resume "
            "from the one before it."
        ) from error


def find_resume(config: RunConfig) -> Saved | None:
    """The checkpoint that ``checkpoint.resume`` names, checked to belong to this run.

    Raises CheckpointError when it is missing, incomplete or of another run.
    """
    folder = config.run.dir / "checkpoints"
    choice = config.checkpoint.resume
    if choice == "never":
        if complete_checkpoints(folder):
            raise CheckpointError(
                f'{folder} holds checkpoints and checkpoint.resume = "never" would overwrite them. '
                "Set another run.name, or move the folder away."
            )
        return None
    if choice == "auto":
        newest = complete_checkpoints(folder)[-1:]
        if not newest:
            return None
        saved = newest[0]
    else:
        path = Path(choice)
        if not (path / STATE_FILE).is_file():
            raise CheckpointError(
                f"checkpoint.resume = {choice!r} is not a complete checkpoint: {path / STATE_FILE} is missing."
            )
        saved = _read(path)
    wanted = identity(config)
    changed = [
        f"{key} was {saved.identity.get(key)!r}, now {wanted[key]!r}"
        for key in wanted
        if saved.identity.get(key) != wanted[key]
    ]
    if changed:
        raise CheckpointError(
            f"{saved.path} belongs to a different run: {'; '.join(changed)}. Restore the setting, or start a run "
            "with another run.name."
        )
    return saved


def step_folder(config: RunConfig, step: int) -> Path:
    return config.run.dir / "checkpoints" / f"global_step_{step}"


def publish(config: RunConfig, step: int) -> None:
    """Declare ``step_folder(step)`` complete, then delete all but the newest ``checkpoint.keep``."""
    path = step_folder(config, step) / STATE_FILE
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        json.dump({"step": step, "identity": identity(config)}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    for old in complete_checkpoints(path.parent.parent)[: -config.checkpoint.keep]:
        (old.path / STATE_FILE).unlink()  # first: a half-deleted folder must not look complete
        shutil.rmtree(old.path)


@contextmanager
def full_disk_is_told(folder: Path) -> Iterator[None]:
    """Turn "no space left", which each library that writes a part says in a class of its own, into CheckpointError."""
    try:
        yield
    except Exception as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise CheckpointError(
            f"no space is left for {folder}. It is incomplete and will not be resumed from; the checkpoint before it "
            "is kept. Free some, then run the same command again."
        ) from error


def save(
    config: SftConfig, step: int, write: Callable[[str], None], *, rank: int, barrier: Callable[[], object]
) -> None:
    """Write checkpoint ``step`` on all ranks and publish it.

    ``write(folder)`` is collective: every rank calls it with the same folder.
    """
    folder = step_folder(config, step)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # what a kill left of the same step
        folder.mkdir(parents=True)
    barrier()
    with full_disk_is_told(folder):
        write(str(folder / "actor"))
    barrier()
    if rank == 0:
        publish(config, step)
    barrier()
