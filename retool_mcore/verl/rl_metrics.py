"""Step metrics that verl's trainer lacks: time outside the step, and the load of the engines."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real  # includes numpy integers, which verl's minima and maxima are
from statistics import fmean
from typing import Any

import ray
from ray.exceptions import RayActorError


def row_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of a step's row, without duplicates under a second name."""
    row = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    if row.get("critic/score/mean") == row.get("critic/rewards/mean"):  # no KL penalty is in the reward
        row.pop("critic/score/mean", None)
    if "response_length/mean" in row:  # absent in a validation's row, which keeps ours
        row.pop("behavior/response_tokens", None)
    return row


class StepClock:
    """Measures wall time between rows of metrics that verl's timers miss; in seconds."""

    def __init__(self) -> None:
        self._row_s = self._step_s = self._metrics_s = time.perf_counter()

    def step_begins(self) -> None:
        self._step_s = time.perf_counter()

    def metrics_begin(self) -> None:
        self._metrics_s = time.perf_counter()

    def row_written(self) -> dict[str, float]:
        """Return the times; call just before a row is written, and once before the first step."""
        now_s = time.perf_counter()
        times = {"timing_s/between_steps": self._step_s - self._row_s, "timing_s/metrics": now_s - self._metrics_s}
        self._row_s = now_s
        return times


class EngineLoad:
    """The load of the run's SGLang servers while they had requests.

    verl/sglang_server.py polls each server's request counts. The means are over the polls of all
    servers:

    engine/running/mean   requests running in a server
    engine/queued/mean    requests waiting in a server's queue

    vLLM is not polled, so it has no such metrics.
    """

    def __init__(self, servers: Callable[[], Sequence[Any]]) -> None:
        self._servers = servers
        self._polls: list[tuple[int, int]] = []

    def keep(self) -> None:
        """Fetch and keep the servers' polls since the last call."""
        self._polls += self._fetched()

    def forget(self) -> None:
        """Discard the polls since the last ``keep``, to exclude those of a validation."""
        self._fetched()

    def metrics(self) -> dict[str, float]:
        """Metrics of the polls kept since the last call."""
        polls, self._polls = self._polls, []
        return load_metrics(polls)

    def _fetched(self) -> list[tuple[int, int]]:
        polls: list[tuple[int, int]] = []
        for call in [server.take_polls.remote() for server in self._servers() if hasattr(server, "take_polls")]:
            with contextlib.suppress(RayActorError):  # polls of a dead server are lost; engines.py restarts it
                polls += ray.get(call)
        return polls


def load_metrics(polls: Iterable[tuple[int, int]]) -> dict[str, float]:
    """The means over polls of (running, queued); {} without polls."""
    found = list(polls)
    if not found:
        return {}
    running, queued = zip(*found, strict=True)
    return {"engine/running/mean": fmean(running), "engine/queued/mean": fmean(queued)}
