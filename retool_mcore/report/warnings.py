"""What about a run deserves a look now, from its files alone."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from retool_mcore.report.numbers import duration, number
from retool_mcore.report.record import RunRecord
from retool_mcore.report.state import State, stage_of_start, step_seconds
from retool_mcore.run.start import WORDS

STALLED_S = 120.0  # a step may be late by this much ...
STALLED_STEPS = 5.0  # ... and by this many usual steps, for validations and checkpoints
START_STAGE_S = 900.0  # of one stage; large models load within it
WINDOW = 5  # steps that are compared with the run's first ones
MISMATCH_RISE = 3.0
MISMATCH_FLOOR = 1e-3  # nats; below it engine and actor agree, however the number moves
MISMATCH_BOUND = 0.05  # nats, five times what engines with an FP8 cache have; engines with other weights have nats
TAUGHT_NOTHING = 0.9


def warnings_of(run: RunRecord, state: State, now_s: float) -> list[str]:
    """One sentence for each thing that is wrong or about to be. ``now_s``: seconds since 1970."""
    found = [_stalled(run, now_s) if state.name == "running" else "", *_of_newest(run), _mismatch(run), _groups(run)]
    if state.name == "killed":
        found.insert(0, f"not running, stopped {state.stage}")
    return [each for each in found if each]


def _stalled(run: RunRecord, now_s: float) -> str:
    log = run.path / "logs"
    starting = stage_of_start(run)
    if starting:
        waited_s = now_s - run.begun[-1][1]
        words = WORDS.get(starting, starting)
        late = waited_s > START_STAGE_S
        return f"the start has been {words} for {duration(waited_s)}: look into {log}" if late else ""
    usual_s = step_seconds(run.rows)
    if usual_s is None or not run.rows:
        return ""
    waited_s = now_s - run.rows[-1].get("unix_s", now_s)
    if waited_s <= max(STALLED_S, STALLED_STEPS * usual_s):
        return ""
    what = "an engine, the interpreter or a node may be stuck" if run.kind == "rl" else "a rank may be stuck"
    return f"no step for {duration(waited_s)}, and one usually takes {duration(usual_s)}: {what}; look into {log}"


def _of_newest(run: RunRecord) -> list[str]:
    if not run.rows:
        return []
    row = run.rows[-1]
    found: list[str] = []
    odd = [name for name in ("loss", "grad_norm", "reward") if not math.isfinite(row.get(name, 0.0))]
    if odd:
        found.append(f"{' and '.join(odd)} of step {run.step} {'is' if len(odd) == 1 else 'are'} not finite")
    if row.get("rollout/dropped", 0.0) > 0:
        found.append(f"outages dropped {row['rollout/dropped']:.0f} trajectories in step {run.step}")
    if row.get("reward/check_failed", 0.0) > 0:
        found.append(f"{row['reward/check_failed']:.1%} of step {run.step}'s answers could not be checked")
    return found


def _mismatch(run: RunRecord) -> str:
    values = [abs(value) for value in run.values("mismatch/kl")]
    if values and (newest := median(values[-WINDOW:])) > MISMATCH_BOUND:
        return (
            f"engine and actor disagree: mismatch/kl is {number(newest)} nats, and {MISMATCH_BOUND} is the bound. "
            "Check number types and rope settings, and lower train.max_staleness"
        )
    if len(values) < 2 * WINDOW:
        return ""
    first, last = median(values[:WINDOW]), median(values[-WINDOW:])
    if last <= max(MISMATCH_FLOOR, MISMATCH_RISE * first):
        return ""
    return (
        f"the engine drifts from the actor: mismatch/kl is {number(last)} nats over the last {WINDOW} steps, and was "
        f"{number(first)} over the first"
    )


def _groups(run: RunRecord) -> str:
    right, wrong = run.values("groups/all_right")[-WINDOW:], run.values("groups/all_wrong")[-WINDOW:]
    if len(right) < WINDOW or len(right) != len(wrong):
        return ""
    nothing = _mean_sum(right, wrong)
    if nothing <= TAUGHT_NOTHING:
        return ""
    return f"{nothing:.0%} of the last {WINDOW} steps' groups taught nothing: all right or all wrong"


def _mean_sum(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(a + b for a, b in zip(first, second, strict=True))
