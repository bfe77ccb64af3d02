"""Checkpoints of a run: their layout, the best one, the one to resume from, and saving.

    <run>/checkpoints/global_step_50/
        actor/model/huggingface/   weights in Hugging Face's layout, written by the bridge;
                                   `retool export` copies them. With [lora]: adapters in peft's
                                   format and hashes of their base model
        actor/optimizer/dist_ckpt/ Adam moments, float32 main weights and the schedule, sharded by
                                   Megatron
        actor/extra/dist_ckpt/     RNG states per pp and tp rank
        critic/                    RL with a critic: as actor/
        transfer_queue             RL with prompts in flight: verl's queue
        checksums/                 checksums of each writer's files, while a save is incomplete
        data.pt                    RL only: state of verl's data loader (SFT's position is the step
                                   itself)
        state.json                 the step, the identity of the run, all of its settings, the
                                   parallel layout of the save, sizes and checksums of all files;
                                   written last, so its presence means that the checkpoint is
                                   complete

The folder layout is verl's, so verl's tools can read our checkpoints. A folder without state.json
is an interrupted save. It is never resumed from; an SFT run deletes it when it resumes, and an RL
run overwrites it when it reaches that step again. A kill at any moment leaves the previous
checkpoint valid, even during an asynchronous save. A checkpoint whose files fail the checksums is
damaged: the next start renames it and resumes from the one before it.

A run touches only folders named ``global_step_N``, and only CONTENTS inside them. It
does not touch a user's copy such as ``global_step_8_keep``.

A file's checksum is the CRC-32 of the CRC-32s of its 64 MiB pieces, so that threads can share a
large file. It detects corruption by disks and copies, even if only four bytes differ, but does not
stop an attacker. zlib processes 1.7 GB/s per core.

verl, torch and Megatron unpickle parts of a checkpoint, so loading one can execute code. A run
therefore resumes only from files that belong to its user or root and are not world-writable.

The best step (best.metric) and early stopping (best.patience) have a record:

    <run>/best.json    the metric, its mode, the value of every validated step, the best step and
                       its value, and the number of consecutive validations without improvement
                       ("waited")

Only the values are state; everything else is computed from them. A run that resumes from a step
drops the values after that step, so its best step and patience are again those of that step. The
config checks enforce that every validated step is saved, so the best step always has a checkpoint;
checkpoint.keep does not delete it. A value is written to disk before the run acts on it.

Among equal values, the earliest step is the best. The minimum gain in best.patience affects only
patience: a smaller gain still makes a new best checkpoint, but does not reset the patience.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, cast

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.config.base import is_table
from retool_mcore.config.lora import Lora
from retool_mcore.errors import CheckpointError, RunError
from retool_mcore.run import heartbeat
from retool_mcore.run.folder import explain_full_disk, is_full, write_atomic

STATE_FILE = "state.json"
SUMS = "checksums"
BEST_FILE = "best.json"
DISK_FULL = (
    "Its files were deleted; the checkpoint before it is kept. Free some space, then run the same command again."
)
CONTENTS = (STATE_FILE, SUMS, "actor", "critic", "data.pt", "transfer_queue")
VERSION = 3  # of state.json; newer releases write higher versions
LOADABLE = 3  # the lowest version that a run can resume from; earlier ones were written with Megatron-core 0.16
LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
# Keys of identity() that may change between save and resume. New values apply from the next step.
CHANGEABLE = ("optim.lr", "optim.min_lr", "optim.weight_decay", "optim.clip_grad", "critic.lr")
UNSET = "(not set)"
PIECE_BYTES = 64 * 2**20  # of a file, with a checksum each
READ_BYTES = 2**20
CHECKSUM_THREADS = 8
MAX_LISTED = 3  # maximum number of damaged files that an error lists
_NAME = re.compile(r"global_step_([1-9][0-9]*)")
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")  # Megatron names a file after the rank that wrote it
LOCATIONS = ("run.root", "run.name", "checkpoint.resume")  # settings that locate a run but do not define it


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    version: int  # of its state.json
    identity: dict[str, Any]
    settings: dict[str, Any]  # all of the run's
    layout: dict[str, int]
    reshardable: bool
    files: dict[str, Any]  # sizes and checksums


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must not change between save and resume.

    Otherwise the schedule and the moments would not fit. The keys in CHANGEABLE are exceptions.
    Users may change these, and any setting not returned here; the run prints a note and uses the
    new values.
    """
    constant = config.optim.schedule == "constant" and not config.optim.warmup_fraction
    shared = {
        "model": config.model.model_dump(),
        "lora": config.lora.model_dump() if config.lora.rank else Lora().model_dump(),
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
    roles["data"] = {"curriculum": "solve_rate" if config.data.curriculum < 1 else "off"}
    if config.algorithm.name == "ppo":  # a PPO run also saves a critic
        roles["critic"] = {"lr": config.critic.lr, "warmup_steps": None if constant else config.critic.warmup_steps}
    return shared | keys | roles | {"train_file": config.data.train_file}


def layout(config: RunConfig) -> dict[str, int]:
    """Return the parallel sizes (tp, pp, vpp, cp, ep, etp, dp) of the run."""
    sizes = config.parallel.model_dump() | {"dp": config.dp}
    return {size: sizes[size] for size in LAYOUT}


class Damaged(CheckpointError):
    """A checkpoint's files differ from what was written."""


def complete_checkpoints(folder: Path) -> list[Saved]:
    """Return all complete checkpoints in a ``checkpoints`` folder, oldest first.

    Skips those with an unreadable state.json, and copies under the name of another step. Raises
    CheckpointError for a checkpoint of a newer release.
    """
    complete: list[Saved] = []
    for step, path in step_folders(folder).items():
        if (path / STATE_FILE).is_file():
            with suppress(Damaged):
                complete += [saved for saved in (read_state(path),) if saved.step == step]
    return complete


def read_state(path: Path) -> Saved:
    """Read state.json in ``path``. Raises Damaged, or CheckpointError if of a newer release."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if int(state["version"]) > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer release: its state has version {state['version']}, but this one reads "
                f"up to {VERSION}. Install that release, or set another run.name."
            )
        return Saved(
            step=int(state["step"]),
            path=path,
            version=int(state["version"]),
            identity=state["identity"],
            settings=state["settings"],
            layout={size: int(state["layout"][size]) for size in LAYOUT},
            reshardable=bool(state["reshardable"]),
            files=state["files"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"{path / STATE_FILE} is not a valid checkpoint state ({error}). Move the folder {path} away to resume "
            "from the one before it."
        ) from error


@dataclass(frozen=True, kw_only=True)
class BestStep:
    """The settings of [best] and the values of best.metric so far, by step in ascending order."""

    metric: str
    mode: str
    patience: int
    min_delta: float
    values: Mapping[int, float] = field(default_factory=dict[int, float])

    def step(self, last: int | None = None) -> int | None:
        """Return the best step (up to ``last``, if given); None before the first value."""
        steps = [step for step in self.values if last is None or step <= last]
        return min(steps, key=lambda step: (self._cost(step), step), default=None)

    @property
    def waited(self) -> int:
        """Number of validations since the value last improved by more than ``min_delta``."""
        waited, reference = 0, math.inf
        for step in sorted(self.values):
            if self._cost(step) < reference - self.min_delta:
                waited, reference = 0, self._cost(step)
            else:
                waited += 1
        return waited

    @property
    def stopped_early(self) -> bool:
        return bool(self.patience) and self.waited >= self.patience

    def with_value(self, step: int, value: float) -> BestStep:
        return replace(self, values={**self.up_to(step - 1).values, step: value})

    def up_to(self, step: int) -> BestStep:
        return replace(self, values={known: value for known, value in sorted(self.values.items()) if known <= step})

    def metrics(self) -> dict[str, float]:
        """Return best/step, best/value and best/waited; empty before the first value."""
        step = self.step()
        if step is None:
            return {}
        return {"best/step": float(step), "best/value": self.values[step], "best/waited": float(self.waited)}

    def summary(self) -> str:
        """Return one line for users: the best value, its step, and the validations since then."""
        step = self.step()
        if step is None:
            return f"{self.metric}: no value yet"
        text = f"best {self.metric} {self.values[step]:.6g} at step {step}"
        delta = f" by more than {self.min_delta:g}" if self.min_delta else ""
        since = f"{self.waited} validation{'s' if self.waited > 1 else ''}"
        return f"{text}, no improvement{delta} in {since}" if self.waited else text

    def to_json(self) -> str:
        step = self.step()
        values = [{"step": step, "value": value} for step, value in sorted(self.values.items())]
        best = {"step": step, "value": None if step is None else self.values[step], "waited": self.waited}
        rule = {"metric": self.metric, "mode": self.mode, "patience": self.patience, "min_delta": self.min_delta}
        return json.dumps({**rule, **best, "ended_early": self.stopped_early, "values": values}, indent=2)

    def _cost(self, step: int) -> float:
        return -self.values[step] if self.mode == "max" else self.values[step]


def read_best(run_dir: Path) -> BestStep | None:
    """Read ``<run>/best.json``; None if it does not exist. Raises CheckpointError if invalid."""
    path = run_dir / BEST_FILE
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        return BestStep(
            metric=str(record["metric"]),
            mode=str(record["mode"]),
            patience=int(record["patience"]),
            min_delta=float(record["min_delta"]),
            values={int(entry["step"]): float(entry["value"]) for entry in record["values"]},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a valid record of a run's best checkpoint ({error}). Move it away; the run then compares "
            "only later steps."
        ) from error


def best_so_far(config: RunConfig, step: int) -> BestStep | None:
    """Return the values up to ``step`` with the current settings; None without best.metric.

    Raises CheckpointError when the values on disk belong to another metric.
    """
    wanted = config.best
    if not wanted.metric:
        return None
    rule = BestStep(metric=wanted.name, mode=config.best_mode, patience=wanted.validations, min_delta=wanted.min_delta)
    recorded = read_best(config.run.dir)
    if recorded is None:
        return rule
    if (recorded.metric, recorded.mode) != (rule.metric, rule.mode):
        raise CheckpointError(
            f"{config.run.dir / BEST_FILE} has the values of {recorded.metric} ({recorded.mode}), but {config.source} "
            f'sets best.metric = "{rule.metric}" ({rule.mode}). Restore the setting, or move the file away; then no '
            "earlier step can become the best."
        )
    return replace(rule, values=recorded.values).up_to(step)


def lacks_value(config: RunConfig, step: int) -> bool:
    """Whether ``step`` is saved and due for validation but has no value.

    The run was killed between saving and validation, or best.metric was added later.
    """
    best = best_so_far(config, step)
    return best is not None and _is_due(config, step) and step not in best.values


def _is_due(config: RunConfig, step: int) -> bool:
    """Whether the settings schedule a validation (and therefore a save) at ``step``."""
    _, every = config.validation_interval
    return every > 0 < step and (step % every == 0 or step == config.num_steps)


class BestKeeper:
    """Maintains best.json during a run. Only the process with ``writes`` writes the file."""

    def __init__(self, config: RunConfig, step: int, *, writes: bool = True) -> None:
        """``step``: the step that the run resumes from; 0 for a new run."""
        self._config, self._path, self._writes = config, config.run.dir / BEST_FILE, writes
        self.best = best_so_far(config, step)
        if self.best is not None:
            self._write(self.best)

    def record_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metric's value if a validation is due at ``step``.

        Raises RunError when the metric is missing or not finite.
        """
        if self.best is None or not _is_due(self._config, step):
            return
        metric = self.best.metric
        if metric not in metrics:
            there = ", ".join(sorted(name for name in metrics if name.startswith("val")))
            raise RunError(
                f'best.metric = "{metric}" is not among the metrics of the validation at step {step}. There are: '
                f"{there or 'none'}. Set another metric, and run the same command again."
            )
        value = float(metrics[metric])
        if not math.isfinite(value):
            raise RunError(
                f"{metric} = {value} at step {step} cannot be compared. Check the validation data, or remove "
                "best.metric, and run the same command again; it resumes from the last checkpoint."
            )
        self.best = self.best.with_value(step, value)
        self._write(self.best)

    def metrics(self) -> dict[str, float]:
        return {} if self.best is None else self.best.metrics()

    @property
    def stopped_early(self) -> bool:
        return self.best is not None and self.best.stopped_early

    def _write(self, best: BestStep) -> None:
        if self._writes:
            write_atomic(self._path, best.to_json() + "\n")


def require_intact(config: RunConfig) -> list[str]:
    """Verify the checksums of the checkpoint to resume from; return notes for the user.

    Renames damaged checkpoints that are newer than the newest intact one. The caller must hold the
    run's lock (folder.lock_run). Raises CheckpointError when no checkpoint is intact, or when the
    one that ``checkpoint.resume`` names is damaged.
    """
    choice, folder = config.checkpoint.resume, config.run.dir / "checkpoints"
    if choice not in ("auto", "never"):
        if (Path(choice) / STATE_FILE).is_file() and (problem := _damage(Path(choice))):
            raise CheckpointError(f"checkpoint.resume = {choice!r} is damaged: {problem}. Name another one.")
        return []
    named = step_folders(folder) if choice == "auto" else {}
    damaged: dict[Path, str] = {}
    for step, path in reversed(named.items()):
        if not (path / STATE_FILE).is_file():
            continue
        if problem := _damage(path):
            damaged[path] = problem
        elif read_state(path).step == step:
            return [f"note: {bad} is damaged: {problem}. It is kept as {set_aside(bad, 'damaged').name}"
                    for bad, problem in damaged.items()]  # fmt: skip
    if damaged:
        listed = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        raise CheckpointError(
            f"no checkpoint in {folder} is intact ({listed}). Restore one, or move all away to start over."
        )
    return []


def _damage(path: Path) -> str:
    try:
        return find_damage(path, read_state(path).files)
    except Damaged as error:
        return str(error).partition(" Move ")[0].removeprefix(f"{path}/").rstrip(".")


def find_resume(config: RunConfig) -> Saved | None:
    """Find the checkpoint to resume from (``checkpoint.resume``); None to start from the beginning.

    Raises CheckpointError when it is missing, incomplete, of another run, saved on a layout that
    cannot be converted, owned by another user, or world-writable.
    """
    folder = config.run.dir / "checkpoints"
    choice = config.checkpoint.resume
    if choice == "never":
        if complete_checkpoints(folder):
            raise CheckpointError(
                f'{folder} contains checkpoints, which checkpoint.resume = "never" would overwrite. '
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
        saved = read_state(path)
    differences = _differences(saved.identity, identity(config))
    changed = {key: phrase for key, phrase in differences if key not in CHANGEABLE}
    before = saved.identity.get("steps")
    if "steps" in changed and isinstance(before, int):
        if not (refused := _refused_steps(config, saved, before)):
            del changed["steps"]
        elif len(changed) == 1:
            raise CheckpointError(f"{saved.path} cannot be resumed with another number of steps: {refused}")
    if changed:
        raise CheckpointError(
            f"{saved.path} belongs to a different run: {'; '.join(changed.values())}. Restore the setting, or start a "
            "run with another run.name."
        )
    if saved.version < LOADABLE:
        raise CheckpointError(
            f"{saved.path} was written with Megatron-core 0.16, and this release cannot read its optimizer states. "
            "Continue it with the release that wrote it, or run `retool export` and start a run with another "
            "run.name and model.path set to the exported model."
        )
    _check_layout(saved, config)
    require_own(saved.path)
    return saved


def require_own(folder: Path) -> None:
    """Raise CheckpointError if a file belongs to another user (not root) or is world-writable."""
    for path in (folder, *folder.rglob("*")):
        status = path.stat()
        if status.st_uid not in (0, os.getuid()):
            why = f"belongs to user {status.st_uid}"
        elif status.st_mode & stat.S_IWOTH:
            why = "is writable by every user"
        else:
            continue
        raise CheckpointError(
            f"{path} {why}, and resuming runs code in a checkpoint's files. Resume only from files that you or root "
            f"wrote. If you trust these files, copy them to your own folder, or run chmod -R o-w {folder}."
        )


def _refused_steps(config: RunConfig, saved: Saved, before: int) -> str:
    """Return why a run of ``before`` steps must not change its number of steps; "" if it may.

    The change must not alter the learning rates of past steps. Steps after the end of the schedule
    use its final rate.
    """
    o, now = config.optim, config.num_steps
    if o.schedule == "constant":
        idle = config.critic.warmup_steps if isinstance(config, RlConfig) else 0  # the actor's warm-up comes after it
        rising = idle + math.ceil(o.warmup_fraction * (max(before, now) - idle))
        if saved.step >= rising:
            return ""
        why = (
            f"the warm-up, {o.warmup_fraction:g} of all steps, is not over at step {saved.step}. First continue with "
            f"train.steps = {before} beyond step {rising}"
        )
    elif saved.step < before:
        why = (
            f'optim.schedule = "{o.schedule}" spans all steps, so the rates of the first {saved.step} would have been '
            f"different. First finish the run with train.steps = {before}; additional steps then use the rate "
            "optim.min_lr"
        )
    elif not o.min_lr:
        why = (
            "the schedule has ended at optim.min_lr = 0, so more steps would learn nothing. Set optim.min_lr to the "
            "rate of the additional steps"
        )
    else:
        return ""
    return (
        f"train.steps was {before}, now {now}: {why}. Or start a new run from these weights: retool export "
        f"{saved.path} --to FOLDER, model.path = FOLDER and another run.name."
    )


def is_finished(config: RunConfig) -> bool:
    """Return whether the newest checkpoint is the last one that the run needs.

    False unless checkpoint.resume is "auto".
    """
    saved = complete_checkpoints(config.run.dir / "checkpoints")
    return config.checkpoint.resume == "auto" and bool(saved) and is_last(config, saved[-1].step)


def is_last(config: RunConfig, step: int) -> bool:
    """Return whether a run at ``step`` has no step and no validation left to do."""
    best = best_so_far(config, step)
    stopped_early = best is not None and best.stopped_early
    return stopped_early or (step >= config.num_steps and not lacks_value(config, step))


def choose_resume(config: RunConfig) -> tuple[Saved | None, list[str]]:
    """Return the checkpoint to resume from (None: start from the beginning) and notes for the user.

    Verifies its files first. The caller must hold the run's lock. Raises CheckpointError as
    ``require_intact`` and ``find_resume`` do.
    """
    notes = require_intact(config)
    saved = find_resume(config)
    if saved is None:
        return None, notes
    changed = changed_settings(saved, config)
    if changed:
        notes.append(f"note: new since {saved.path.name}, used from step {saved.step + 1}: {'; '.join(changed)}")
    if not is_last(config, saved.step):
        notes.append(f"note: resuming after step {saved.step}, from {saved.path}")
    return saved, notes


def changed_settings(saved: Saved, config: RunConfig) -> list[str]:
    """Return a phrase for every setting that differs from the checkpoint's."""
    now = json.loads(json.dumps(config.model_dump()))
    changed = [phrase for key, phrase in _differences(saved.settings, now) if key not in LOCATIONS]
    scheduled = config.optim.schedule != "constant"
    if scheduled and saved.identity.get("steps") == saved.step < config.num_steps:
        changed += [f"the schedule has ended, and the rate stays at optim.min_lr = {config.optim.min_lr:g}"]
    return changed


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a table and of the tables in it, by "section.key"."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values |= flat(value, f"{prefix}{key}.") if is_table(value) else {f"{prefix}{key}": value}
    return values


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, phrase) for every setting that differs between two trees."""
    old, new = flat(before), flat(now)
    return [
        (key, f"{key} was {old.get(key, UNSET)!r}, now {new.get(key, UNSET)!r}")
        for key in {**new, **old}
        if not _same(key, old.get(key, UNSET), new.get(key, UNSET))
    ]


def _same(key: str, before: Any, now: Any) -> bool:
    """Whether two values of a setting are equal; paths are compared as absolute paths."""
    if not key.endswith(("train_file", "files", "path")):
        return before == now
    return [os.path.abspath(str(path)) for path in _listed(before)] == [
        os.path.abspath(str(path)) for path in _listed(now)
    ]


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _check_layout(saved: Saved, config: RunConfig) -> None:
    """Raise CheckpointError when the checkpoint cannot be loaded with the run's parallel layout."""
    now = layout(config)
    changed = {size for size in LAYOUT if saved.layout[size] != now[size]}
    if not changed:
        return
    layouts = f"{saved.path} was saved on {_layout_text(saved.layout)}, but the run's layout is {_layout_text(now)}"
    if kept := changed & {"ep", "etp"}:
        listed = " and ".join(f"parallel.{size} = {saved.layout[size]}" for size in sorted(kept))
        raise CheckpointError(
            f"{layouts}. Megatron saves the optimizer state of experts that are distributed over ranks separately, so "
            f"parallel.ep and parallel.etp may not change. Set {listed}, or start another run from this one's export."
        )
    if saved.reshardable or (changed == {"dp"} and now["ep"] == 1):
        return
    raise CheckpointError(
        f"{layouts}. It was saved with checkpoint.reshardable = false, so only the number of data-parallel ranks may "
        "change, and only with parallel.ep = 1. Resume it on its own layout with checkpoint.reshardable = true, and "
        "on the new one after the next save."
    )


def _layout_text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size} {number}" for size, number in sizes.items() if size != "etp" or number)


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Return the folders named ``global_step_N``, complete or not, by step in ascending order."""
    named = {int(match[1]): path for path in checkpoints.glob("*") if (match := _NAME.fullmatch(path.name))}
    return {step: named[step] for step in sorted(named) if named[step].is_dir()}


def remove_checkpoint(folder: Path) -> None:
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
        yield from (file for file in (path, *path.rglob("*")) if file.is_file())


@dataclass(frozen=True)
class Checksum:
    bytes: int
    crc32: str


def record_checksums(role: Path, rank: int) -> None:
    """Record the checksums of the files that ``rank`` wrote under ``role`` (``.../actor``).

    Every rank calls this for its own files, which are still in its node's page cache, so the total
    time is that of one rank.
    """
    folder = role.parent
    mine = [path for path in files_of(folder) if path.is_relative_to(role) and _writing_rank(path, role) == rank]
    times = [path.stat().st_mtime_ns for path in mine]
    sums = zip(mine, checksums_of(mine), times, strict=True)
    rows = {str(path.relative_to(folder)): {**asdict(checksum), "mtime_ns": time} for path, checksum, time in sums}
    write_atomic(folder / SUMS / f"{role.name}-{rank}.json", json.dumps(rows))


def _writing_rank(path: Path, role: Path) -> int | None:
    """Return the rank that wrote a file; None for metadata files, which belong to no rank."""
    if match := _RANK_FILE.fullmatch(path.name):
        return int(match[1])
    return 0 if path.is_relative_to(role / "model") else None


def collect_checksums(folder: Path) -> dict[str, Any]:
    """Return the checksums of all files of a finished checkpoint, by path relative to ``folder``.

    Reads the files that no rank recorded or that changed after recording.
    """
    recorded: dict[str, Any] = {}
    for path in (folder / SUMS).glob("*.json"):
        recorded |= json.loads(path.read_text(encoding="utf-8"))
    checksums: dict[str, Any] = {}
    unknown: list[Path] = []
    for path in files_of(folder):
        name, status = str(path.relative_to(folder)), path.stat()
        row = recorded.get(name, {})
        if (row.get("bytes"), row.get("mtime_ns")) == (status.st_size, status.st_mtime_ns):
            checksums[name] = {"bytes": row["bytes"], "crc32": row["crc32"]}
        else:
            unknown.append(path)
    read = zip(unknown, checksums_of(unknown), strict=True)
    return checksums | {str(path.relative_to(folder)): asdict(taken) for path, taken in read}


def find_damage(folder: Path, files: Mapping[str, Any], under: str = "") -> str:
    """Describe which of ``files`` differ from what was written; "" if none do.

    ``under``: check only files whose relative path starts with this prefix.
    """
    wanted = {folder / name: Checksum(**row) for name, row in files.items() if name.startswith(under)}
    wrong = [problem for path, row in wanted.items() if (problem := _wrong_size(path, row, folder))]
    if not wrong:  # read the contents only if all sizes match
        read = zip(wanted.items(), checksums_of(wanted), strict=True)
        wrong = [f"{path.relative_to(folder)} differs from what was written" for (path, row), now in read
                 if now != row]  # fmt: skip
    more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    return "; ".join(wrong[:MAX_LISTED]) + more


def _wrong_size(path: Path, wanted: Checksum, folder: Path) -> str:
    name = path.relative_to(folder)
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return "" if size == wanted.bytes else f"{name} has {size} bytes, but {wanted.bytes} were written"


def checksums_of(paths: Iterable[Path]) -> list[Checksum]:
    """Compute the checksum of each file in up to 8 threads; zlib releases the GIL."""
    files = {path: path.stat().st_size for path in paths}
    pieces = [(path, start) for path, size in files.items() for start in range(0, max(size, 1), PIECE_BYTES)]
    crcs: dict[Path, int] = dict(zip(files, repeat(0)))
    with ThreadPoolExecutor(min(CHECKSUM_THREADS, os.cpu_count() or 1)) as threads:
        for (path, _), crc in zip(pieces, threads.map(_crc_of_piece, pieces), strict=True):
            crcs[path] = zlib.crc32(crc.to_bytes(4, "big"), crcs[path])
            heartbeat.send()
    return [Checksum(size, f"{crcs[path]:08x}") for path, size in files.items()]


def _crc_of_piece(piece: tuple[Path, int]) -> int:
    path, start = piece
    crc, left, buffer = 0, PIECE_BYTES, memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            crc, left = zlib.crc32(buffer[:count], crc), left - count
    return crc


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
    write_atomic(path, json.dumps(state, indent=2))
    complete, best = complete_checkpoints(path.parent.parent), read_best(config.run.dir)
    best_step = best.step(last=complete[-1].step) if best else None
    for old in complete[: -config.checkpoint.keep]:
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
        complete = complete_checkpoints(self._config.run.dir / "checkpoints")
        if not complete:
            return "no checkpoint is kept, and the same command starts from the beginning"
        return f"step {complete[-1].step} is saved, and the same command resumes after it"

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
