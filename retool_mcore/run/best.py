"""Tracks the best step of a run by best.metric, and early stopping by best.patience.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retool_mcore.config import RunConfig
from retool_mcore.errors import CheckpointError, RunError
from retool_mcore.run.folder import write_whole

BEST_FILE = "best.json"


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
    def given_up(self) -> bool:
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
        found = f"best {self.metric} {self.values[step]:.6g} at step {step}"
        delta = f" by more than {self.min_delta:g}" if self.min_delta else ""
        since = f"{self.waited} validation{'s' if self.waited > 1 else ''}"
        return f"{found}, no improvement{delta} in {since}" if self.waited else found

    def to_json(self) -> str:
        step = self.step()
        values = [{"step": step, "value": value} for step, value in sorted(self.values.items())]
        found = {"step": step, "value": None if step is None else self.values[step], "waited": self.waited}
        rule = {"metric": self.metric, "mode": self.mode, "patience": self.patience, "min_delta": self.min_delta}
        return json.dumps({**rule, **found, "ended_early": self.given_up, "values": values}, indent=2)

    def _cost(self, step: int) -> float:
        return -self.values[step] if self.mode == "max" else self.values[step]


def read_best(run_dir: Path) -> BestStep | None:
    """Read ``<run>/best.json``; None if it does not exist. Raises CheckpointError if invalid."""
    path = run_dir / BEST_FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return BestStep(
            metric=str(found["metric"]),
            mode=str(found["mode"]),
            patience=int(found["patience"]),
            min_delta=float(found["min_delta"]),
            values={int(each["step"]): float(each["value"]) for each in found["values"]},
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
    found = read_best(config.run.dir)
    if found is None:
        return rule
    if (found.metric, found.mode) != (rule.metric, rule.mode):
        raise CheckpointError(
            f"{config.run.dir / BEST_FILE} has the values of {found.metric} ({found.mode}), but {config.source} sets "
            f'best.metric = "{rule.metric}" ({rule.mode}). Restore the setting, or move the file away; then no earlier '
            "step can become the best."
        )
    return replace(rule, values=found.values).up_to(step)


def lacks_value(config: RunConfig, step: int) -> bool:
    """Whether the run was killed after saving ``step`` but before validating it."""
    best = best_so_far(config, step)
    return best is not None and _is_due(config, step) and step not in best.values


def _is_due(config: RunConfig, step: int) -> bool:
    """Whether the settings schedule a validation (and therefore a save) at ``step``."""
    _, every = config.validated
    return every > 0 < step and (step % every == 0 or step == config.num_steps)


class BestKeeper:
    """Maintains best.json during a run. Only the process with ``writes`` writes the file."""

    def __init__(self, config: RunConfig, step: int, *, writes: bool = True) -> None:
        """``step``: the step that the run resumes from; 0 for a new run."""
        self._config, self._path, self._writes = config, config.run.dir / BEST_FILE, writes
        self.best = best_so_far(config, step)
        if self.best is not None:
            self._write(self.best)

    def lacks(self, step: int) -> bool:
        """Whether ``step`` should have been validated but has no value, because of a kill."""
        return lacks_value(self._config, step)

    def validated(self, step: int, metrics: Mapping[str, Any]) -> None:
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

    def summary(self) -> str:
        return "" if self.best is None else self.best.summary()

    @property
    def given_up(self) -> bool:
        return self.best is not None and self.best.given_up

    def _write(self, best: BestStep) -> None:
        if self._writes:
            write_whole(self._path, best.to_json() + "\n")
