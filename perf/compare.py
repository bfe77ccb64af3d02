"""Compares a result of perf/bench.py with a baseline: a table, and an exit code for a gate.

    python perf/compare.py result.json [baseline.json] [--explained "why it is faster now"]

Where both runs did the same work, step N of the one is compared with step N of the other: a step of
longer rows takes longer in both. Compared are the seconds per token, of all wall time from one row
of metrics to the next; the start; the peak memory; and an RL trajectory's requests. Exit codes:

- 0: no difference, or faster with --explained.
- 1: slower, a later start or more memory, or faster without --explained. A step that lost half its
  work is faster, too.
- 2: not comparable, because hardware, settings, packages or tokens differ. What differs on purpose
  is named with --changed.

A difference counts when it is not chance, by Student's t on the logarithms, and not small. With 20
steps and 2 % of noise, 3 % is found in 9 of 10 runs, and 0 % passes in 99 of 100. Fewer steps, as
RL's baselines have, show only more: the last line says how much (tests/unit/perf/test_gate_power.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench import ROOT, STOPPED, hardware_name, read_case
from rich.console import Console
from rich.table import Table
from scipy.special import nctdtrinc
from scipy.stats import t as students_t

from retool_mcore.cli.common import guarded
from retool_mcore.config.base import is_table
from retool_mcore.errors import ConfigError

CONFIDENCE = 0.99
POWER, NOISE = 0.9, 0.02  # a difference is one that a gate shows if it finds it so often at such noise of a step
DEFAULT_THRESHOLD = 0.03
SMALL = 0.7  # of the threshold: a difference as large as it is measured as less in half of the runs
TOKENS_MAY_DIFFER = 0.01  # share of the measured tokens per step
SAME_TOKENS = 1e-3  # share of one step's tokens up to which two runs did the same step
NOT_COUNTED = ("time_checkpoint_s", "time_validate_s", "time_validate_after_s")  # what is done only in some steps
OUTSIDE_STEP = ("time_metrics_s", "time_between_steps_s", "time_validate_after_s")  # see run/metric_table.py
MORE_MEMORY, MORE_MEMORY_GIB = 0.02, 0.25  # both must be exceeded: a small run's memory is noisy
LATER_START, LATER_START_S = 0.5, 10.0  # both: a start is measured once, and disks have caches
REQUESTS = "behavior/requests"  # of a trajectory
MORE_REQUESTS = 0.02  # what engines abort is asked for again
# Settings that say where a run's files are and how long it goes on, not what a step does.
FREE = (
    "model.path", "data.train_file", "data.allow_overlap", "validation.files", "validation.every", "train.steps",
    "train.stall_s", "train.max_engine_restarts", "checkpoint", "verl_overrides",
)  # fmt: skip


@guarded
def compare(
    result: Annotated[Path, typer.Argument(help="what perf/bench.py wrote")],
    baseline: Annotated[Path | None, typer.Argument(help="default: perf/baselines/CASE.HARDWARE.json")] = None,
    *,
    explained: Annotated[str, typer.Option(help="why it is faster; then faster passes")] = "",
    changed: Annotated[
        list[str] | None, typer.Option(help="a setting or package that differs on purpose", show_default=False)
    ] = None,
) -> None:
    head = read_result(result)
    base = read_result(baseline or default_baseline(head))
    require_comparable(head, base, changed or ())
    threshold = float(read_case(head["case"]).get("threshold", DEFAULT_THRESHOLD))
    ratio, low, high = ratio_of_times([(head, base)])
    Console().print(table(head, base))
    verdict, code = judge(ratio, low, high, threshold, explained)
    typer.echo(
        f"time of a token: {ratio:.4f} of the baseline's, {CONFIDENCE:.0%} interval {low:.4f} to {high:.4f}, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    typer.echo(what_it_shows([(head, base)], threshold))
    grown = [*more_memory(head, base), *later_start(head, base), *more_requests(head, base)]
    for words in grown:
        typer.echo(words)
    raise typer.Exit(1 if grown else code)


def read_result(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result of perf/bench.py: {error}") from error
    if record.get("exit_code") not in (0, STOPPED) or not record.get("steps"):
        raise ConfigError(f"{path} is of a run that failed or measured no step: exit code {record.get('exit_code')}.")
    return record


def default_baseline(record: dict[str, Any]) -> Path:
    return ROOT / "perf" / "baselines" / f"{record['case']}.{hardware_name(record)}.json"


def require_comparable(head: dict[str, Any], base: dict[str, Any], changed: tuple[str, ...] | list[str] = ()) -> None:
    """Raise ConfigError unless both runs did the same work on the same hardware.

    ``changed``: settings, sections of them and packages that may differ.
    """
    for what, ours, theirs in (
        ("case", head["case"], base["case"]),
        ("hardware", hardware_name(head), hardware_name(base)),
    ):
        if ours != theirs:
            raise ConfigError(f"not comparable: {what} is {ours}, the baseline's is {theirs}.")
    told = [
        f"{key} is {ours!r}, the baseline's is {theirs!r}"
        for key, (ours, theirs) in {**_differing(head, base, "settings"), **_differing(head, base, "versions")}.items()
        if not any(key == free or key.startswith(f"{free}.") for free in (*FREE, *changed))
    ]
    if told:
        raise ConfigError(f"not comparable: {'; '.join(told)}. What differs on purpose: --changed NAME, for each.")
    ours, theirs = (record["lengths"]["total"] / len(record["steps"]) for record in (head, base))
    if abs(ours - theirs) > TOKENS_MAY_DIFFER * theirs:
        raise ConfigError(f"not comparable: {ours:.0f} tokens a step, the baseline's are {theirs:.0f}.")


def _differing(head: dict[str, Any], base: dict[str, Any], part: str) -> dict[str, tuple[Any, Any]]:
    """What differs in a part of the provenance, of the keys that both records have."""
    ours, theirs = (_by_key(record["provenance"].get(part, {})) for record in (head, base))
    return {key: (ours[key], theirs[key]) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}


def _by_key(part: dict[str, Any]) -> dict[str, Any]:
    """By "section.key"; a table that is one setting's value, such as engine_args, stays whole."""
    found: dict[str, Any] = {}
    for name, value in part.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if is_table(value) else {name: value}
    return found


def token_times(record: dict[str, Any]) -> list[float]:
    """Seconds per token of each measured step, of the wall time from the row before to its own."""
    found: list[float] = []
    before_s = None
    for row in record["steps"]:
        parts_s = row["time_step_s"] + sum(row.get(name, 0.0) for name in OUTSIDE_STEP)
        wall_s = row["unix_s"] - before_s if before_s is not None and "unix_s" in row else parts_s
        before_s = row.get("unix_s")
        found.append((wall_s - sum(row.get(name, 0.0) for name in NOT_COUNTED)) / row["tokens"])
    return found


def ratio_of_times(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float, float]:
    """The time of a token in the first of each pair of records / in the second, and its interval.

    It is the geometric mean over steps; of the same steps where both did the same work.
    """
    ours, theirs = ([np.log(token_times(record)) for record in records] for records in zip(*pairs, strict=True))
    same = all(did_the_same(head, base) for head, base in pairs)
    if same:
        both = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
        gaps = np.concatenate([a - b for a, b in both])
        mean, error, freedom = gaps.mean(), _error(gaps), len(gaps) - 1
    else:
        a, b = np.concatenate(ours), np.concatenate(theirs)
        mean, error, freedom = a.mean() - b.mean(), math.hypot(_error(a), _error(b)), min(len(a), len(b)) - 1
    reach = float(students_t.ppf((1 + CONFIDENCE) / 2, freedom)) * error if freedom and error else error
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)


def did_the_same(head: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether each step of the one had as many tokens as that step of the other."""
    pairs = zip(head["steps"], base["steps"], strict=False)
    return all(abs(ours["tokens"] - theirs["tokens"]) <= SAME_TOKENS * theirs["tokens"] for ours, theirs in pairs)


def least_shown(pairs: list[tuple[dict[str, Any], dict[str, Any]]], threshold: float) -> tuple[int, float]:
    """How many steps are compared, and the least difference that they show at NOISE.

    It is found in POWER of runs: infinite where a side has a single step.
    """
    sizes = [(len(head["steps"]), len(base["steps"])) for head, base in pairs]
    if all(did_the_same(head, base) for head, base in pairs):
        steps = sum(min(both) for both in sizes)
        error, freedom = NOISE * math.sqrt(2 / steps), steps - 1
    else:
        ours, theirs = (sum(side) for side in zip(*sizes, strict=True))
        steps = min(ours, theirs)
        error, freedom = NOISE * math.sqrt(1 / ours + 1 / theirs), steps - 1
    if not freedom:
        return steps, math.inf
    critical = float(students_t.ppf((1 + CONFIDENCE) / 2, freedom))
    least = float(nctdtrinc(freedom, 1 - POWER, critical)) * error
    not_small = math.log(1 + SMALL * threshold) + float(students_t.ppf(POWER, freedom)) * error
    return steps, math.expm1(max(least, not_small))


def what_it_shows(pairs: list[tuple[dict[str, Any], dict[str, Any]]], threshold: float) -> str:
    """A line: the difference that so few steps can show, whatever the threshold is."""
    steps, least = least_shown(pairs, threshold)
    if math.isinf(least):
        return "shown by 1 step: nothing, as it says nothing of its own noise"
    shown = f"shown by {steps} steps at {NOISE:.0%} of noise, in {POWER:.0%} of runs: a difference of {least:.1%}"
    return shown if least <= threshold else f"{shown}, not of {threshold:.0%}"


def _error(values: np.ndarray) -> float:
    """The standard error of a mean; of a single value nothing is known."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def judge(ratio: float, low: float, high: float, threshold: float, explained: str) -> tuple[str, int]:
    """A difference counts when the interval leaves out 1, and it is not small."""
    if low > 1 and ratio > 1 + SMALL * threshold:
        return "slower", 1
    if high < 1 and 1 / ratio > 1 + SMALL * threshold:
        return (f"faster, as explained: {explained}", 0) if explained else ("faster, and nobody has said why", 1)
    return "no difference", 0


def more_memory(head: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line if the fullest rank holds more than it did."""
    ours, theirs = (max(record["summary"].get("peak_gib_by_rank", {}).values(), default=0.0) for record in (head, base))
    if not theirs or ours <= theirs * (1 + MORE_MEMORY) or ours <= theirs + MORE_MEMORY_GIB:
        return []
    return [f"memory: {ours:.2f} GiB on the fullest rank, the baseline's is {theirs:.2f}: more"]


def later_start(
    head: dict[str, Any], base: dict[str, Any], share: float = LATER_START, seconds: float = LATER_START_S
) -> list[str]:
    """A line if the first step begins later than it did, by more than both."""
    ours, theirs = (float(record.get("start", {}).get("time_start_s", 0.0)) for record in (head, base))
    if not theirs or ours <= theirs * (1 + share) or ours <= theirs + seconds:
        return []
    return [f"start: {ours:.1f} s to the first step, the baseline's is {theirs:.1f}: later"]


def more_requests(head: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line if a trajectory asks the engine more often than it did."""
    ours, theirs = ([row[REQUESTS] for row in record["steps"] if REQUESTS in row] for record in (head, base))
    if not ours or not theirs or np.mean(ours) <= np.mean(theirs) * (1 + MORE_REQUESTS):
        return []
    return [f"requests: {np.mean(ours):.2f} a trajectory, the baseline's are {np.mean(theirs):.2f}: more"]


def table(head: dict[str, Any], base: dict[str, Any]) -> Table:
    shown = Table("median of the steps", f"baseline {base['provenance']['commit'][:9]}", "result", "ratio")
    for name, theirs in base["summary"].items():
        ours = head["summary"].get(name)
        if isinstance(theirs, int | float) and isinstance(ours, int | float):
            shown.add_row(name, f"{theirs:.4g}", f"{ours:.4g}", f"{ours / theirs:.3f}" if theirs else "")
    return shown


if __name__ == "__main__":
    typer.run(compare)
