"""Step metrics that verl's trainer lacks: time around the step, and the load of its engines."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real  # includes numpy's integers, which verl's minima and maxima are
from typing import Any

import ray
from ray.exceptions import RayActorError

from retool_mcore.verl.token_means import LOSS_TOKENS

# Our names for what verl reports, so that SFT, RL and perf/ speak of the same things.
RENAMED = {
    "critic/score/mean": "reward",
    "actor/pg_loss": "loss",
    f"actor/{LOSS_TOKENS}": LOSS_TOKENS,
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "critic/vf_loss": "value_loss",
    "response_length/mean": "response_tokens",
    "training/num_turns/mean": "num_turns",
    "training/rollout_probs_diff_mean": "rollout_actor_prob_diff_mean",
    "training/rollout_probs_diff_max": "rollout_actor_prob_diff_max",
}
KEPT = {"response_length/mean"}  # one of verl's family of lengths, which the planner reads as a whole


def row_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's row: each under one name, ours where verl has another for it."""
    twice = {theirs for theirs, ours in RENAMED.items() if ours in metrics} - KEPT
    return {name: float(value) for name, value in metrics.items() if name not in twice and isinstance(value, Real)}


class StepClock:
    """Wall time between rows of metrics that no timer of verl's covers; see run/metrics.py."""

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


class EngineLoad:
    """The load of the run's SGLang servers while they had requests.

    The numbers come from the polls of verl/sglang_server.py.

    engine/running/mean, max   requests that one server was computing, over polls of all servers
    engine/queued/mean, max    requests that waited in one server for a place

    vLLM is not polled, so with it these metrics are absent.
    """

    def __init__(self, servers: Callable[[], Sequence[Any]]) -> None:
        self._servers = servers
        self._polls: list[tuple[int, int]] = []
        self._asked: list[Any] = []

    def ask(self) -> None:
        """Ask for the servers' polls since the last call, and do not wait.

        When sampling has ended: a server that begins the next step's requests takes its time.
        """
        self._asked += [server.take_polls.remote() for server in self._servers() if hasattr(server, "take_polls")]

    def keep(self) -> None:
        """Fetch the servers' polls since the last call and keep them."""
        self.ask()
        self._gather()

    def _gather(self) -> None:
        asked, self._asked = self._asked, []
        for call in asked:
            with contextlib.suppress(RayActorError):  # what a dead one noted is lost; verl/engines.py restarts it
                self._polls += ray.get(call)

    def forget(self) -> None:
        """Discard the polls since the last ``keep`` or ``ask``: those of a validation."""
        self._gather()
        kept = list(self._polls)
        self.keep()
        self._polls = kept

    def metrics(self) -> dict[str, float]:
        """Metrics of the polls since the last call, up to the last ``ask`` if there was one."""
        if not self._asked:
            self.ask()
        self._gather()
        polls, self._polls = self._polls, []
        return load_metrics(polls)


def load_metrics(polls: Iterable[tuple[int, int]]) -> dict[str, float]:
    """engine/running/* and engine/queued/* of (running, queued) polls; empty if there are none."""
    found = list(polls)
    if not found:
        return {}
    out: dict[str, float] = {}
    for name, counts in zip(("running", "queued"), zip(*found, strict=True), strict=True):
        out |= {f"engine/{name}/mean": sum(counts) / len(counts), f"engine/{name}/max": float(max(counts))}
    return out
