"""Which step of a run is the best by best.metric, and whether the run waits for a better one.

    <run>/best.json    the metric, its mode, the value of every validated step, the best step and
                       its value, and how many validations in a row were no better ("waited")

The values decide, and the rest is worked out from them: a run that resumes from a step drops the
values after it, and its best step and its patience are those of that step. Every validated step is
saved (a rule of the settings), so the best step always has a checkpoint, which checkpoint.keep does
not delete. A value is on disk before anything follows from it.

The earliest of equal values is the best. The gain that best.patience names is for patience alone: a
smaller one makes a new best checkpoint, and does not make the run wait longer.
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
    """The values of best.metric so far, by step in ascending order."""

    metric: str
    mode: str
    patience: int
    min_delta: float
    values: Mapping[int, float] = field(default_factory=dict[int, float])

    def step(self, last: int | None = None) -> int | None:
        """The best step, of those up to ``last`` if that is given; None before the first value."""
        steps = [step for step in self.values if last is None or step <= last]
        return min(steps, key=lambda step: (self._cost(step), step), default=None)

    @property
    def waited(self) -> int:
        """Validations since the last value that was better by more than min_delta."""
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
        """best/step, best/value and best/waited; empty before the first value."""
        step = self.step()
        if step is None:
            return {}
        return {"best/step": float(step), "best/value": self.values[step], "best/waited": float(self.waited)}

    def words(self) -> str:
        """One sentence for people."""
        step = self.step()
        if step is None:
            return f"{self.metric}: no value yet"
        found = f"best {self.metric} {self.values[step]:.6g} at step {step}"
        delta = f" by more than {self.min_delta:g}" if self.min_delta else ""
        since = f"{self.waited} validation{'s' if self.waited > 1 else ''}"
        return f"{found}, not bettered{delta} in {since}" if self.waited else found

    def to_json(self) -> str:
        step = self.step()
        values = [{"step": step, "value": value} for step, value in sorted(self.values.items())]
        found = {"step": step, "value": None if step is None else self.values[step], "waited": self.waited}
        rule = {"metric": self.metric, "mode": self.mode, "patience": self.patience, "min_delta": self.min_delta}
        return json.dumps({**rule, **found, "ended_early": self.given_up, "values": values}, indent=2)

    def _cost(self, step: int) -> float:
        return -self.values[step] if self.mode == "max" else self.values[step]


def read_best(run_dir: Path) -> BestStep | None:
    """What ``<run>/best.json`` says; None where there is none. Raises CheckpointError."""
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
            f"{path} is not the record of a run's best checkpoint ({error}). Move it away: the run then knows no "
            "better step than those that are still to come."
        ) from error


def best_so_far(config: RunConfig, step: int) -> BestStep | None:
    """The record of a run that stands at ``step``, by its settings now; None without best.metric.

    Raises CheckpointError when the values on disk are of another metric.
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
            f"{config.run.dir / BEST_FILE} has the values of {found.metric} ({found.mode}), and {config.source} asks "
            f'for best.metric = "{rule.metric}" ({rule.mode}). Restore the setting, or move the file away: earlier '
            "steps then cannot become the best."
        )
    return replace(rule, values=found.values).up_to(step)


def lacks_value(config: RunConfig, step: int) -> bool:
    """Whether a run with best.metric stands at a step of which a kill took the validation."""
    best = best_so_far(config, step)
    return best is not None and _is_due(config, step) and step not in best.values


def _is_due(config: RunConfig, step: int) -> bool:
    """Whether the step is validated, and then also saved."""
    _, every = config.validated
    return every > 0 < step and (step % every == 0 or step == config.num_steps)


class BestKeeper:
    """The record of a run while it goes on. One process of a run writes it (``writes``)."""

    def __init__(self, config: RunConfig, step: int, *, writes: bool = True) -> None:
        """``step``: the step that the run continues from, 0 for a new one."""
        self._config, self._path, self._writes = config, config.run.dir / BEST_FILE, writes
        self.best = best_so_far(config, step)
        if self.best is not None:
            self._write(self.best)

    def lacks(self, step: int) -> bool:
        """Whether ``step`` was to be validated and has no value, as a kill took it."""
        return lacks_value(self._config, step)

    def validated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the value of a validation, if one is due at ``step``.

        Raises RunError when there is none that can be compared.
        """
        if self.best is None or not _is_due(self._config, step):
            return
        metric = self.best.metric
        if metric not in metrics:
            there = ", ".join(sorted(name for name in metrics if name.startswith("val")))
            raise RunError(
                f'best.metric = "{metric}" is not among the metrics of the validation at step {step}. There are: '
                f"{there or 'none'}. Set another, and start the same command again."
            )
        value = float(metrics[metric])
        if not math.isfinite(value):
            raise RunError(
                f"{metric} = {value} at step {step} cannot be compared. Look at the validation data, or leave out "
                "best.metric, and start the same command again; it continues from the last checkpoint."
            )
        self.best = self.best.with_value(step, value)
        self._write(self.best)

    def metrics(self) -> dict[str, float]:
        return {} if self.best is None else self.best.metrics()

    def words(self) -> str:
        return "" if self.best is None else self.best.words()

    @property
    def given_up(self) -> bool:
        return self.best is not None and self.best.given_up

    def _write(self, best: BestStep) -> None:
        if self._writes:
            write_whole(self._path, best.to_json() + "\n")
