"""The metrics of a run: one JSONL line per step, and the same numbers to its trackers.

With validation.before the first line is of step 0, and has the metrics of that validation alone.

loss          in SFT nats per trained token, mean over the global batch. In RL what algorithm.loss
              and loss_agg make of the advantages, without kl_coef: in the unit of advantages, its
              zero means nothing. The mean over the step's updates
lr, grad_norm the learning rate of the step's last update; the gradient norm before clipping, in RL
              the mean over the step's updates
tokens        all tokens of the step, over all ranks; loss_tokens: those that the loss is taken on,
              without what is masked or rejected
actor/entropy nats per token: of the actor's distribution at the step's start, mean over the tokens
              in the loss before rejection. With algorithm.old_log_prob = "rollout" estimated by
              -log p of the tokens that the first update learns from
actor/pg_clipfrac, actor/pg_clipfrac_lower, actor/ppo_kl
              shares of tokens that clip, or clip_c, keeps from learning, and the
              mean of log p_old - log p: over the loss_tokens of all updates of the step, each token
              once, with the weights of its own update
mismatch/*    engine against the weights at the step's start, over the sampled tokens, also rejected
              ones: kl is the mean of log p_engine - log p_actor, max and p99 are of its size. With
              old_log_prob = "rollout" over the step's first update alone, since later ones have
              other weights; rollout_actor_prob_diff_* and rollout_corr/* likewise
rollout_corr/*  verl's, over tokens in the loss before rejection or over responses that have any;
              in mode "async" the mean over the step's updates, and the maximum or minimum of names
              with max or min
tokens_per_s  tokens / (time_step_s without checkpoints and validation), for the whole run: all
              ranks, all engines; tokens_per_s_per_gpu: the same / GPUs of [cluster]
flops         model FLOPs of the step, by ModelShape.train_flops
mfu           flops / (peak FLOPs * GPUs * seconds of data, forward_backward and optimizer); in RL
              the GPUs that train and the seconds of the actor's update; absent where the device's
              peak is not known
memory_gib    the highest so far on any rank: of the device's allocator, or resident memory on a
              CPU; memory_gib/rank_N: the highest on rank N
gpu_percent   share of the last second in which the logging rank's device was busy; absent where
              the device has no such counter
unix_s        when the row was written, in seconds since 1970
experts/*     of a model with experts, over all tokens of an update, summed over its micro-batches
              and ranks (with those that fill a sequence up for parallel.tp and cp): in RL the
              actor's, the mean over the step's updates.
              experts/load_max_over_mean/layer_N: tokens of layer N's busiest expert / the mean over
              its experts; 1: all alike; N counts from 0. Without /layer_N: the mean over the
              layers. experts/unused: share of all layers' experts that no token chose
time_*_s      wall time by phase; the phases add up to time_step_s. In RL, tool_wait is the
              interpreter's part of the trajectory that the step waited for, engine_sleep is the
              time in which the engine gives back its memory, and generation excludes both. Three
              phases lie outside RL's step: validate_after, metrics (these numbers and the
              trajectory file) and between_steps, from the last row to this step (verl's clean-up
              and console). With time_step_s they add up to the time between the unix_s of two
              rows. In SFT time_step_s is all of that time
time_start_s  in the first row of a run's start: from its first check to its first step;
              time_start/STAGE_s: of each stage of run/start.py
val_loss      nats per trained token of the validation file
engine/restarts  in RL, rollout engines that died and were restarted since the row before
best/step     with best.metric, in rows with a validation: the best step so far; best/value: its
              value; best/waited: validations since a value better by what best.patience asks
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
    for name in ("loss", "grad_norm", "value_loss"):
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
