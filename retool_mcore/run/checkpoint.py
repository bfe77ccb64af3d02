"""Checkpoints of a run. Each is complete or does not count; the newest few and the best are kept.

    <run>/checkpoints/global_step_50/
        actor/model/huggingface/   weights in Hugging Face's layout, written by the bridge;
                                   `retool export` copies them
        actor/optimizer/dist_ckpt/ Adam moments, float32 main weights and the schedule, sharded by
                                   Megatron
        actor/extra/dist_ckpt/     random states of every rank
        data.pt                    RL only: where verl's data loader stands (SFT's position is the
                                   step itself)
        state.json                 the step, the identity of the run, all of its settings and the
                                   parallel layout it was saved on; written last, so its presence
                                   means complete

The folder layout is verl's, so verl's own tools can read our checkpoints. A folder without
state.json is what a kill left behind: it is never resumed from, it is deleted when an SFT run
resumes, and it is overwritten when an RL run reaches that step again. A kill at any moment leaves
the previous checkpoint valid, even while an asynchronous save is being written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.config.base import leaves
from retool_mcore.errors import CheckpointError
from retool_mcore.run.best import read_best
from retool_mcore.run.folder import write_whole

STATE_FILE = "state.json"
LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
# Keys of identity() that may change between a save and its resume. The new value applies from the
# next step on.
FREE = ("optim.lr", "optim.min_lr", "optim.weight_decay", "optim.clip_grad", "critic.lr")
NOT_RECORDED = "(not recorded)"
UNSET = "(not set)"
# Keys of identity() that came later, with the value that runs before them had; and such sizes.
ADDED = {"data.curriculum": "off"}
# Keys of identity() that came later and had no one value: not judged where they are not recorded.
LATER = ("mini_batch_prompts", "critic.warmup_steps")
PLACES = ("run.root", "run.name", "checkpoint.resume")  # settings that say where a run is, not what
LATER_SIZES = {"etp": 0}


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    identity: dict[str, Any]
    settings: dict[str, Any]  # all of the run's; {} in a checkpoint from before they were kept
    layout: dict[str, int]
    reshardable: bool

    def has_random_states_of(self, config: RunConfig) -> bool:
        """Whether ``config`` has the tp and pp sizes that the random states were saved for.

        They are saved per pipeline and tensor parallel rank; data-parallel ranks have equal ones.
        """
        now = layout(config)
        return all(self.layout[size] == now[size] for size in ("tp", "pp"))


class Pending(Protocol):
    """A save whose files are still being written; see verl/async_save.py."""

    def ended(self) -> bool: ...
    def finish(self) -> None: ...
    def kill(self) -> None: ...


def identity(config: RunConfig) -> dict[str, Any]:
    """What must be equal at a save and its resume, so that the saved schedule and moments fit.

    The keys in FREE are exceptions: the user may change them on purpose, as all settings that are
    not here. The new value takes effect, and the run says so.
    """
    constant = config.optim.schedule == "constant" and not config.optim.warmup_fraction
    shared = {
        "model": config.model.model_dump(),
        "optim": config.optim.model_dump(),
        "steps": None if constant else config.num_steps,  # the schedule spans them
        "seed": config.run.seed,
    }
    if isinstance(config, SftConfig):
        keys = {"global_batch": config.train.global_batch, "max_length_tokens": config.data.max_length_tokens}
        return shared | keys | {"train_file": config.data.train_file}
    assert isinstance(config, RlConfig), f"a run is SFT or RL, not {type(config).__name__}"
    keys = {"prompts_per_step": config.train.prompts_per_step, "group_size": config.rollout.group_size}
    keys |= {"mini_batch_prompts": None if constant else config.train.mini_batch_prompts}  # it counts updates
    roles: dict[str, Any] = {"tool": config.rollout.tool, "algorithm": config.algorithm.name}
    roles["data"] = {"curriculum": config.data.curriculum}
    if config.algorithm.name == "ppo":  # a PPO run saves a critic, too
        roles["critic"] = {"lr": config.critic.lr, "warmup_steps": None if constant else config.critic.warmup_steps}
    return shared | keys | roles | {"train_file": config.data.train_file}


def layout(config: RunConfig) -> dict[str, int]:
    """The parallel sizes, by which the run's processes share the model and the data."""
    sizes = config.parallel.model_dump() | {"dp": config.dp}
    return {size: sizes[size] for size in LAYOUT}


def complete_checkpoints(folder: Path) -> list[Saved]:
    """All complete checkpoints under a ``checkpoints`` folder, oldest first."""
    found = [_read(path) for path in folder.glob("global_step_*") if (path / STATE_FILE).is_file()]
    return sorted(found, key=lambda saved: saved.step)


def _read(path: Path) -> Saved:
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return Saved(
            step=int(state["step"]),
            path=path,
            identity=state["identity"],
            settings=state.get("settings", {}),
            layout={size: int((LATER_SIZES | state["layout"])[size]) for size in LAYOUT},
            reshardable=bool(state["reshardable"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / STATE_FILE} is not a checkpoint's state ({error}). Move the folder {path} away to resume "
            "from the one before it."
        ) from error


def find_resume(config: RunConfig) -> Saved | None:
    """Find the checkpoint that ``checkpoint.resume`` names and check that it belongs to this run.

    Raises CheckpointError when it is missing, incomplete or from another run.
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
    changed = [words for key, words in _changes(saved, config) if key not in FREE]
    if changed:
        raise CheckpointError(
            f"{saved.path} belongs to a different run: {'; '.join(changed)}. Restore the setting, or start a run "
            "with another run.name."
        )
    _check_layout(saved, config)
    return saved


def tell_changed_settings(saved: Saved, config: RunConfig, console: Console) -> None:
    """Print one line that names every setting that differs from the checkpoint's."""
    if saved.settings:
        before, now = leaves(saved.settings), leaves(json.loads(json.dumps(config.model_dump())))
        keys = [key for key in {**now, **before} if key not in PLACES and now.get(key, UNSET) != before.get(key, UNSET)]
        changed = [f"{key} was {before.get(key, UNSET)!r}, now {now.get(key, UNSET)!r}" for key in keys]
    else:
        changed = [words for key, words in _changes(saved, config) if key in FREE]
    if changed:
        line = f"note: from step {saved.step + 1} on, other than in {saved.path.name}: {'; '.join(changed)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _changes(saved: Saved, config: RunConfig) -> list[tuple[str, str]]:
    before, now = ADDED | leaves(saved.identity), leaves(identity(config))
    return [
        (key, f"{key} was {before.get(key, NOT_RECORDED)!r}, now {value!r}")
        for key, value in now.items()
        if before.get(key, NOT_RECORDED) != value and (key in before or key not in LATER)
    ]


def _check_layout(saved: Saved, config: RunConfig) -> None:
    """Raise CheckpointError when the checkpoint cannot be loaded on the run's parallel layout."""
    now = layout(config)
    changed = {size for size in LAYOUT if saved.layout[size] != now[size]}
    if not changed:
        return
    found = f"{saved.path} was saved on {_words(saved.layout)}, and the run's layout is {_words(now)}"
    if kept := changed & {"ep", "etp"}:
        told = " and ".join(f"parallel.{size} = {saved.layout[size]}" for size in sorted(kept))
        raise CheckpointError(
            f"{found}. Megatron keeps the optimizer of experts that are spread over ranks apart, so parallel.ep and "
            f"parallel.etp may not change. Set {told}, or start another run from this one's export."
        )
    if saved.reshardable or (changed == {"dp"} and now["ep"] == 1):
        return
    raise CheckpointError(
        f"{found}. It was saved with checkpoint.reshardable = false, so only the number of data-parallel ranks may "
        "change. Resume it on its own layout with checkpoint.reshardable = true, and on the new one after the next "
        "save."
    )


def _words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size} {number}" for size, number in sizes.items() if size != "etp" or number)


def step_folder(config: RunConfig, step: int) -> Path:
    return config.run.dir / "checkpoints" / f"global_step_{step}"


def publish(config: RunConfig, step: int) -> None:
    """Mark ``step_folder(step)`` complete, then delete all but the newest ``checkpoint.keep``.

    The best of the complete ones is kept as well. A later one that is still being written does not
    count: a kill may take it.
    """
    path = step_folder(config, step) / STATE_FILE
    state = {
        "step": step,
        "identity": identity(config),
        "settings": config.model_dump(),
        "layout": layout(config),
        "reshardable": config.checkpoint.reshardable,
    }
    write_whole(path, json.dumps(state, indent=2))
    found, best = complete_checkpoints(path.parent.parent), read_best(config.run.dir)
    best_step = best.step(last=found[-1].step) if best else None
    for old in found[: -config.checkpoint.keep]:
        if old.step == best_step:
            continue
        (old.path / STATE_FILE).unlink()  # first: a half-deleted folder must not look complete
        shutil.rmtree(old.path)


@contextmanager
def explain_full_disk(folder: Path) -> Generator[None]:
    """Turn "no space left" into CheckpointError; each library has its own class for it."""
    try:
        yield
    except Exception as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise CheckpointError(
            f"no space is left for {folder}. It is incomplete and will not be resumed from; the checkpoint before it "
            "is kept. Free some, then run the same command again."
        ) from error


def delete_incomplete(config: RunConfig) -> None:
    """Delete what kills left in the run's folder. The caller holds the run (folder.lock_run)."""
    for path in (config.run.dir / "checkpoints").glob("global_step_*"):
        if not (path / STATE_FILE).is_file():
            shutil.rmtree(path)


class Saver:
    """Writes and publishes the checkpoints of a run, with at most one save in flight.

    ``write(folder, step)`` returns the save that is still being written, or None when everything
    is on disk. Under SFT ``write`` and all methods are collective: every rank calls them with the
    same arguments. Under RL one process calls them for all ranks. Leaving the ``with`` block
    completes the save in flight, or gives it up after an error.
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
        """Start checkpoint ``step`` once the one in flight is complete."""
        self.wait()
        folder = step_folder(self._config, step)
        if self._rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._barrier()
        with explain_full_disk(folder):
            pending = self._write(str(folder / "actor"), step)
        if pending is None:
            self._publish(step)
        else:
            self._in_flight = (step, pending)

    def poll(self) -> None:
        """Publish the checkpoint in flight when all of its files are written."""
        if self._in_flight is not None and self._in_flight[1].ended():
            self.wait()

    def wait(self) -> None:
        if self._in_flight is None:
            return
        step, pending = self._in_flight
        with explain_full_disk(step_folder(self._config, step)):
            pending.finish()
        self._in_flight = None
        self._publish(step)

    def _publish(self, step: int) -> None:
        self._barrier()
        if self._rank == 0:
            publish(self._config, step)
        self._barrier()
