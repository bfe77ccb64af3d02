"""The metrics of a run: one JSONL line per step, and the same numbers to its trackers.

With validation.before the first line is of step 0, and has the metrics of that validation alone.

metric_table.py has every name, unit and meaning.
"""

import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from retool_mcore.config import RunConfig
from retool_mcore.errors import ReToolError
from retool_mcore.run.folder import write_whole
from retool_mcore.run.trackers import Trace, Trackers

EXPERTS = "experts/"  # what the names of all metrics of experts begin with


class NonFiniteLoss(ReToolError, ArithmeticError):
    """The loss or gradient norm became NaN or infinite; the newest checkpoint is from before."""


def require_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raise NonFiniteLoss before a NaN can reach a checkpoint.

    A step has the losses of what it trained: critic.warmup_steps train no actor.
    """
    for name in ("loss", "grad_norm", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise NonFiniteLoss(
                f"{name} = {metrics[name]} at step {step}. The newest checkpoint is from an earlier step; "
                "lower optim.lr or optim.clip_grad, or look at the rows of this step, then run the same command again."
            )


def token_rates(tokens: float, times: Mapping[str, float], num_gpus: int) -> dict[str, float]:
    """tokens_per_s and tokens_per_s_per_gpu of a step; ``num_gpus`` are all of [cluster]."""
    now_and_then_s = sum(times.get(name, 0.0) for name in ("time_checkpoint_s", "time_validate_s"))
    rate = tokens / (times["time_step_s"] - now_and_then_s)
    return {"tokens_per_s": rate, "tokens_per_s_per_gpu": rate / num_gpus}


def memory_by_rank(peaks_gib: Sequence[float]) -> dict[str, float]:
    """memory_gib and memory_gib/rank_N, from the peaks of the ranks in rank order."""
    return {"memory_gib": max(peaks_gib)} | {f"memory_gib/rank_{rank}": peak for rank, peak in enumerate(peaks_gib)}


class PhaseTimer:
    """Wall time of a step, split by phase; what no phase claims is ``time_other_s``.

    The time of an inner span is not counted in the outer one, so the phases add up to the step.
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
        """Give the time since the last call to the innermost open span."""
        now_s = time.perf_counter()
        name = self._open[-1] if self._open else "other"
        self._spans_s[name] = self._spans_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def flush(self) -> dict[str, float]:
        """Times since the last flush, as metric names; starts the next step."""
        assert not self._open, f"the step ends inside {self._open}"
        self._charge()
        times = {f"time_{name}_s": span_s for name, span_s in self._spans_s.items()}
        times["time_step_s"] = self._last_s - self._start_s
        self._spans_s, self._start_s = {}, self._last_s
        return times


class MetricWriter:
    """Appends to ``metrics.jsonl`` and to the run's trackers.

    A resumed run drops the rows that it will write again; trackers.py says what each tracker does.
    """

    def __init__(self, config: RunConfig, *, resumed_step: int) -> None:
        self._path = config.run.dir / "metrics.jsonl"
        self._keep_up_to(resumed_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._trackers = Trackers(config, config.run.dir, resumed_step=resumed_step)

    def _keep_up_to(self, step: int) -> None:
        if not self._path.exists():
            return
        rows = read_metrics(self._path) if step else []  # a run from its beginning writes step 0 anew, too
        kept = [row for row in rows if row["step"] <= step]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, metrics: Mapping[str, float], traces: Sequence[Trace] = ()) -> None:
        """A row, and to the trackers ``traces``, too: trajectories of the step."""
        self._file.write(json.dumps({"step": step, **metrics, "unix_s": time.time()}) + "\n")
        self._file.flush()
        self._trackers.log(metrics, step, traces)

    def close(self) -> None:
        self._file.close()
        self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a ``metrics.jsonl``, up to a line that a kill cut short."""
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
