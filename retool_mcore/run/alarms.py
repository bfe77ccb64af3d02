"""Alarms: problems of a run that its metrics show."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

WINDOW = 5  # number of steps that an alarm averages
MISMATCH_RISE = 3.0
MISMATCH_FLOOR = 1e-3  # nats; below this, engine and actor agree, whatever the trend
MISMATCH_BOUND = 0.05  # nats, 5 times the mismatch with an FP8 cache; wrong weights cause several nats
MUST_BE_FINITE = ("loss", "grad_norm", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean")
SAME_REWARD = 0.9  # share of groups
MALFORMED = 0.25  # share of calls
CUT = 0.25  # share of responses

Row = Mapping[str, float]


def alarms(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the problems visible in the metrics: alarm name -> sentence.

    ``settings``: the sections of config.toml. docs/metrics.md lists the alarms.
    """
    steps = [row for row in rows if row["step"] >= 1]
    rollout = settings.get("rollout", {})
    sentences = {
        **(_newest_step(steps[-1]) if steps else {}),
        "validation": _validation(rows),
        "groups": _groups(steps),
        "malformed": _malformed(steps),
        "calls": _calls(steps, rollout.get("tools") or ()),
        "cut": _cut(steps, rollout.get("max_response_tokens")),
        "mismatch": _mismatch(steps),
    }
    return {name: sentence for name, sentence in sentences.items() if sentence}


def _newest_step(row: Row) -> dict[str, str]:
    step, sentences = int(row["step"]), dict[str, str]()
    odd = [name for name in MUST_BE_FINITE if not math.isfinite(row.get(name, 0.0))]
    if odd:
        sentences["finite"] = f"{' and '.join(odd)} of step {step} {'is' if len(odd) == 1 else 'are'} not finite"
    if row.get("grad_norm", row.get("actor/grad_norm")) == 0:
        sentences["gradient"] = f"grad_norm of step {step} is 0: nothing in the step's loss has a gradient"
    if row.get("rollout/dropped", 0.0) > 0:
        sentences["dropped"] = f"step {step} dropped {row['rollout/dropped']:.0f} trajectories"
    if row.get("reward/check_failed", 0.0) > 0:
        sentences["check"] = f"{row['reward/check_failed']:.1%} of step {step}'s answers could not be checked"
    return sentences


def _values(rows: Sequence[Row], metric: str) -> list[float]:
    return [row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))]


def _recent(steps: Sequence[Row], metric: str) -> float | None:
    """Return the metric's mean over the last WINDOW steps that have it."""
    values = _values(steps, metric)[-WINDOW:]
    return fmean(values) if values else None


def _last(steps: Sequence[Row]) -> str:
    count = min(WINDOW, len(steps))
    return f"the last {count} steps" if count > 1 else f"step {int(steps[-1]['step'])}"


def _validation(rows: Sequence[Row]) -> str:
    for row in reversed(rows):
        if "val/accuracy" in row:
            wrong = row["val/accuracy"] == 0
            return f"every answer of step {int(row['step'])}'s validation is wrong" if wrong else ""
    return ""


def _groups(steps: Sequence[Row]) -> str:
    """Check rewards, not answers: with a custom reward, wrong answers may differ in reward."""
    same = _recent(steps, "groups/same_reward")
    if same is None or same <= SAME_REWARD:
        return ""
    return f"{same:.0%} of the groups of {_last(steps)} teach nothing: all rewards within a group are equal"


def _malformed(steps: Sequence[Row]) -> str:
    newest = steps[-WINDOW:]
    malformed = sum(value for row in newest for name, value in row.items() if name.startswith("behavior/malformed/"))
    calls = malformed + sum(row.get("behavior/calls", 0.0) for row in newest)
    if not calls or malformed <= MALFORMED * calls:
        return ""
    return (
        f"{malformed / calls:.0%} of the calls of {_last(steps)} were malformed. "
        "Look at behavior/malformed/*, and check that rollout.protocol is the model's"
    )


def _calls(steps: Sequence[Row], tools: Sequence[str]) -> str:
    if not tools or _recent(steps, "behavior/code_ratio") != 0:
        return ""
    return f"no trajectory of {_last(steps)} called a tool, although rollout.tools offers {', '.join(map(str, tools))}"


def _cut(steps: Sequence[Row], limit: int | None) -> str:
    ends = [_recent(steps, f"behavior/stop/{reason}") for reason in ("length", "no_room")]
    cut = sum(share or 0.0 for share in ends)
    if cut <= CUT:
        return ""
    limits = "rollout.max_response_tokens" + (f" = {limit}" if limit else "")
    return f"{cut:.0%} of the responses of {_last(steps)} were cut at {limits}"


def _mismatch(steps: Sequence[Row]) -> str:
    values = [abs(value) for value in _values(steps, "rollout_corr/kl")]
    if values and (newest := median(values[-WINDOW:])) > MISMATCH_BOUND:
        return (
            f"engine and actor disagree: rollout_corr/kl is {newest:.4g} nats, above {MISMATCH_BOUND}. "
            "Check data types and RoPE settings, and lower train.max_staleness"
        )
    if len(values) < 2 * WINDOW:
        return ""
    first, last = median(values[:WINDOW]), median(values[-WINDOW:])
    if last <= max(MISMATCH_FLOOR, MISMATCH_RISE * first):
        return ""
    return (
        f"the engine drifts away from the actor: rollout_corr/kl is {last:.4g} nats over the last {WINDOW} steps, "
        f"and was {first:.4g} over the first {WINDOW}"
    )
