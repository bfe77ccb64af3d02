"""What a step of verl's trainer has no number for: the time around it, and how full its engines
are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import ray


class StepClock:
    """The wall time from one row of metrics to the next that no timer of verl's covers; see
    run/metrics.py.
    """

    def __init__(self) -> None:
        self._row_s = self._step_s = self._metrics_s = time.perf_counter()

    def step_begins(self) -> None:
        self._step_s = time.perf_counter()

    def metrics_begin(self) -> None:
        self._metrics_s = time.perf_counter()

    def row_written(self) -> dict[str, float]:
        """Call it just before a row is written, and once before the first step."""
        now_s = time.perf_counter()
        times = {"time_between_steps_s": self._step_s - self._row_s, "time_metrics_s": now_s - self._metrics_s}
        self._row_s = now_s
        return times


class _Trainer(Protocol):
    def _rollout_server_managers(self) -> list[Any]: ...


class EngineLoad:
    """How full the run's SGLang servers were while they had requests, from verl/sglang_server.py's
    polls.

    engine/running/mean, max   requests that one server was computing, over polls of all servers
    engine/queued/mean, max    requests that waited in one server for a place

    Of vLLM nothing is polled, so the numbers are absent.
    """

    def __init__(self, trainer: _Trainer) -> None:
        self._trainer = trainer
        self._polls: list[tuple[int, int]] = []

    def keep(self) -> None:
        """Ask the servers for the polls since the last time."""
        managers = self._trainer._rollout_server_managers()
        servers = [server for manager in managers for server in manager.server_handles if hasattr(server, "take_polls")]
        self._polls += [poll for polls in ray.get([server.take_polls.remote() for server in servers]) for poll in polls]

    def forget(self) -> None:
        """Leave out what was polled since the last ``keep``: a validation's."""
        kept = list(self._polls)
        self.keep()
        self._polls = kept

    def metrics(self) -> dict[str, float]:
        """Of the polls since the last call."""
        self.keep()
        polls, self._polls = self._polls, []
        return load_metrics(polls)


def load_metrics(polls: Iterable[tuple[int, int]]) -> dict[str, float]:
    """engine/running/* and engine/queued/* of polls (running, queued); nothing of no polls."""
    found = list(polls)
    if not found:
        return {}
    out: dict[str, float] = {}
    for name, counts in zip(("running", "queued"), zip(*found, strict=True), strict=True):
        out |= {f"engine/{name}/mean": sum(counts) / len(counts), f"engine/{name}/max": float(max(counts))}
    return out


def measure_sglang() -> None:
    """Have verl start our servers where it would start its own, in this process."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")  # installs what verl's SGLang modules need before they can be imported
    from retool_mcore.verl.sglang_server import MeasuredReplica

    RolloutReplicaRegistry.register("sglang", lambda: MeasuredReplica)
