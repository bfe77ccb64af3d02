"""Writes the metrics of a run to ``metrics.jsonl`` and to its trackers.

Each step has one line. In RL, a validation adds a second line with the same step. With
validation.before, the first line is the validation of step 0. metric_table.py lists names, units
and meanings.
"""

import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from retool_mcore.config import RunConfig
from retool_mcore.errors import ReToolError
from retool_mcore.platforms.base import Platform
from retool_mcore.run.folder import write_atomic
from retool_mcore.run.metric_table import is_of_validation, is_written
from retool_mcore.run.start import start_times
from retool_mcore.run.trackers import Trace, Trackers

EXPERTS = "experts/"  # prefix of the metrics of experts
Row = dict[str, float]  # a step's metrics


class NonFiniteLoss(ReToolError, ArithmeticError):
    """The loss or gradient norm is NaN or infinite. The newest checkpoint predates it."""


def require_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raise NonFiniteLoss before a NaN can reach a checkpoint.

    Missing losses are ignored: steps within critic.warmup_steps do not train the actor.
    """
    for name in ("loss", "grad_norm", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise NonFiniteLoss(
                f"{name} = {metrics[name]} at step {step}. The newest checkpoint is from an earlier step; "
                "lower optim.lr or optim.clip_grad, or check the data of this step, then run the same command again."
            )


def token_rates(tokens: float, times: Mapping[str, float], num_gpus: int) -> dict[str, float]:
    """Return token metrics of a step (tokens, tokens/s, tokens/s per GPU).

    ``times`` are in seconds; saving and validating do not count. ``num_gpus`` counts all GPUs of
    [cluster].
    """
    save_and_validate_s = sum(times.get(name, 0.0) for name in ("timing_s/save_checkpoint", "timing_s/validate"))
    rate = tokens / (times["timing_s/step"] - save_and_validate_s)
    return {"perf/total_num_tokens": tokens, "tokens_per_s": rate, "perf/throughput": rate / num_gpus}


def step_rates(
    metrics: Mapping[str, float], times: Mapping[str, float], platform: Platform, num_gpus: int
) -> dict[str, float]:
    """Token rates of the step, and the MFU of its update without validation and checkpoints."""
    rates = token_rates(metrics["perf/total_num_tokens"], times, num_gpus)
    if platform.device.peak_flops:
        work_s = sum(times[f"timing_s/{name}"] for name in ("data", "forward_backward", "optimizer"))
        rates["mfu"] = metrics["flops"] / (platform.device.peak_flops * num_gpus * work_s)
    busy_percent = platform.gpu_percent()
    return rates if busy_percent is None else rates | {"gpu_percent": busy_percent}


class PhaseTimer:
    """Splits the wall time of a step by phase; the rest is ``timing_s/other``. Times in seconds.

    The time of a nested span does not count towards the outer one, so the phases add up to the
    step.
    """

    def __init__(self) -> None:
        self._spans_s: dict[str, float] = {}
        self._open: list[str] = []
        self._start_s = self._last_s = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Add the time since the last call to the innermost open span."""
        now_s = time.perf_counter()
        name = self._open[-1] if self._open else "other"
        self._spans_s[name] = self._spans_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def flush(self) -> dict[str, float]:
        """Return the times since the last flush by metric name, and start the next step."""
        assert not self._open, f"the step ends inside {self._open}"
        self._charge()
        times = {f"timing_s/{name}": span_s for name, span_s in self._spans_s.items()}
        times["timing_s/step"] = self._last_s - self._start_s
        self._spans_s, self._start_s = {}, self._last_s
        return times


class MetricWriter:
    """Appends to ``metrics.jsonl`` and to the run's trackers.

    A resumed run first drops the rows of the steps it will repeat. For trackers, see trackers.py.
    """

    def __init__(self, config: RunConfig, *, resumed_step: int) -> None:
        self._path = config.run.dir / "metrics.jsonl"
        self._keep_up_to(resumed_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._trackers = Trackers(config, config.run.dir, resumed_step=resumed_step)
        self._dir, self._starting = config.run.dir, True  # until the first step

    def _keep_up_to(self, step: int) -> None:
        if not self._path.exists():
            return
        rows = _lines(self._path) if step else ()  # a run that starts over also rewrites step 0
        kept = [row for row in rows if row["step"] <= step]
        write_atomic(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, metrics: Mapping[str, float], traces: Sequence[Trace] = ()) -> None:
        """Write a step's metrics (metric_table.py). Trackers also get ``traces``.

        The first step also gets the times of the start.
        """
        if step and self._starting:
            metrics, self._starting = {**metrics, **start_times(self._dir)}, False
        written = {name: value for name, value in metrics.items() if is_written(name)}
        validation = {name: value for name, value in written.items() if is_of_validation(name)}
        rows = [{name: value for name, value in written.items() if name not in validation}, validation]
        now_s = time.time()
        self._file.write("".join(json.dumps({"step": step, **row, "unix_s": now_s}) + "\n" for row in rows if row))
        self._file.flush()
        self._trackers.log(written, step, traces)

    def close(self) -> None:
        self._file.close()
        self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a ``metrics.jsonl``: one dict per step, merged with the step's validation."""
    rows: list[dict[str, float]] = []
    for row in _lines(path):
        add_row(rows, row)
    return rows


def add_row(rows: list[dict[str, float]], row: dict[str, float]) -> None:
    """Append ``row``, or merge it into the last row if both have the same step."""
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1] |= row
    else:
        rows.append(row)


def _lines(path: Path) -> Generator[dict[str, float]]:
    """Yield the rows; stop at a line that a kill truncated."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
