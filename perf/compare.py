"""Compares a result of perf/bench.py with a baseline. Prints a table; the exit code is the verdict.

    python perf/compare.py result.json [baseline.json] [--explained "why it is faster now"]

It compares seconds per token (all wall time between two rows of metrics), the time to the first
step, the peak memory, and the engine requests per RL trajectory. If both runs did the same work, it
compares each step with the same step of the other run, because longer rows take longer in both.
Exit codes:

- 0: no difference, or faster with --explained.
- 1: slower, a later start, more memory or more requests; or faster without --explained, because a
  step that lost half of its work is also faster.
- 2: not comparable, because hardware, settings, packages or tokens differ. Name intended
  differences with --changed.

A difference counts if it is significant (Student's t on the logarithms) and not small. With fewer
steps, such as in RL's baselines, only larger differences are significant. The output includes the
smallest detectable difference (tests/unit/perf/test_perf_gate.py).
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
POWER, NOISE = 0.9, 0.02  # a detectable difference is found with this probability, at this noise per step
DEFAULT_THRESHOLD = 0.03
# A difference counts if it exceeds this share of the threshold: half of the time, a true difference
# of 3 % is measured as less than 3 %.
SMALL = 0.7
TOKENS_MAY_DIFFER = 0.01  # largest relative difference of the mean tokens per step
SAME_TOKENS = 1e-3  # largest relative difference of the tokens of two steps with the same work
NOT_COUNTED = ("timing_s/save_checkpoint", "timing_s/validate", "timing_s/testing")  # phases of only some steps
OUTSIDE_STEP = ("timing_s/metrics", "timing_s/between_steps", "timing_s/testing")  # see run/metric_table.py
MORE_MEMORY, MORE_MEMORY_GIB = 0.02, 0.25  # both must be exceeded, because a small run's memory is noisy
LATER_START, LATER_START_S = 0.5, 10.0  # both must be exceeded: a run starts only once, and disks have caches
TOKENS = "perf/total_num_tokens"
REQUESTS = "behavior/requests"  # per trajectory
MORE_REQUESTS = 0.02  # aborted requests are sent again
# Settings that determine where files are and how long a run takes, not what a step does.
FREE = (
    "model.path", "data.train_file", "data.allow_overlap", "validation.files", "validation.every", "train.steps",
    "train.stall_s", "train.max_engine_restarts", "checkpoint", "verl_overrides",
)  # fmt: skip


@guarded
def compare(
    result: Annotated[Path, typer.Argument(help="result of perf/bench.py")],
    baseline: Annotated[Path | None, typer.Argument(help="default: perf/baselines/CASE.HARDWARE.json")] = None,
    *,
    explained: Annotated[str, typer.Option(help="why the result is faster; without it, faster fails")] = "",
    changed: Annotated[
        list[str] | None, typer.Option(help="a setting or package that differs on purpose", show_default=False)
    ] = None,
) -> None:
    head = read_result(result)
    default_baseline = ROOT / "perf" / "baselines" / f"{head['case']}.{hardware_name(head)}.json"
    base = read_result(baseline or default_baseline)
    require_comparable(head, base, changed or ())
    threshold = float(read_case(head["case"]).get("threshold", DEFAULT_THRESHOLD))
    ratio, low, high = ratio_of_times([(head, base)])
    Console().print(table(head, base))
    verdict, code = judge(ratio, low, high, threshold, explained)
    typer.echo(
        f"seconds per token: {ratio:.4f} of the baseline's, {CONFIDENCE:.0%} interval {low:.4f} to {high:.4f}, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    typer.echo(detectable_line([(head, base)], threshold))
    regressions = [*more_memory(head, base), *later_start(head, base), *more_requests(head, base)]
    for line in regressions:
        typer.echo(line)
    raise typer.Exit(1 if regressions else code)


def read_result(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a result of perf/bench.py: {error}") from error
    if record.get("exit_code") not in (0, STOPPED) or not record.get("steps"):
        raise ConfigError(
            f"{path} has no measured steps or its run failed (exit code {record.get('exit_code')}). Run it again."
        )
    return record


def require_comparable(head: dict[str, Any], base: dict[str, Any], changed: tuple[str, ...] | list[str] = ()) -> None:
    """Raise ConfigError unless both runs had about as many tokens per step on the same hardware.

    ``changed``: settings, sections of them and packages that may differ.
    """
    for what, ours, theirs in (
        ("case", head["case"], base["case"]),
        ("hardware", hardware_name(head), hardware_name(base)),
    ):
        if ours != theirs:
            raise ConfigError(f"not comparable: {what} is {ours}, but {theirs} in the baseline.")
    differences = [
        f"{key} is {ours!r}, but {theirs!r} in the baseline"
        for key, (ours, theirs) in {**_differing(head, base, "settings"), **_differing(head, base, "versions")}.items()
        if not any(key == free or key.startswith(f"{free}.") for free in (*FREE, *changed))
    ]
    if differences:
        raise ConfigError(f"not comparable: {'; '.join(differences)}. Add --changed NAME for each intended difference.")
    ours, theirs = (record["lengths"]["total"] / len(record["steps"]) for record in (head, base))
    if abs(ours - theirs) > TOKENS_MAY_DIFFER * theirs:
        raise ConfigError(f"not comparable: {ours:.0f} tokens per step, but {theirs:.0f} in the baseline.")


def _differing(head: dict[str, Any], base: dict[str, Any], part: str) -> dict[str, tuple[Any, Any]]:
    """Keys of a part of the provenance that both records have with different values."""
    ours, theirs = (_by_key(record["provenance"].get(part, {})) for record in (head, base))
    return {key: (ours[key], theirs[key]) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}


def _by_key(part: dict[str, Any]) -> dict[str, Any]:
    """Flatten sections to "section.key". A setting that is itself a table stays whole."""
    found: dict[str, Any] = {}
    for name, value in part.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if is_table(value) else {name: value}
    return found


def token_times(record: dict[str, Any]) -> list[float]:
    """Seconds per token of each measured step: wall time since the previous row / tokens."""
    found: list[float] = []
    before_s = None
    for row in record["steps"]:
        parts_s = row["timing_s/step"] + sum(row.get(name, 0.0) for name in OUTSIDE_STEP)
        wall_s = row["unix_s"] - before_s if before_s is not None and "unix_s" in row else parts_s
        before_s = row.get("unix_s")
        found.append((wall_s - sum(row.get(name, 0.0) for name in NOT_COUNTED)) / row[TOKENS])
    return found


def ratio_of_times(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float, float]:
    """Seconds per token of the first records / of the second, with its confidence interval.

    The ratio is the geometric mean over steps, paired if both did the same work.
    """
    ours, theirs = ([np.log(token_times(record)) for record in records] for records in zip(*pairs, strict=True))
    if all(did_same_work(head, base) for head, base in pairs):
        both = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
        gaps = np.concatenate([a - b for a, b in both])
        mean, error, freedom = gaps.mean(), _error(gaps), len(gaps) - 1
    else:
        a, b = np.concatenate(ours), np.concatenate(theirs)
        mean, error, freedom = a.mean() - b.mean(), math.hypot(_error(a), _error(b)), min(len(a), len(b)) - 1
    reach = float(students_t.ppf((1 + CONFIDENCE) / 2, freedom)) * error if freedom and error else error
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)


def did_same_work(head: dict[str, Any], base: dict[str, Any]) -> bool:
    """Whether each step of one record had as many tokens as the same step of the other."""
    pairs = zip(head["steps"], base["steps"], strict=False)
    return all(abs(ours[TOKENS] - theirs[TOKENS]) <= SAME_TOKENS * theirs[TOKENS] for ours, theirs in pairs)


def detectable(pairs: list[tuple[dict[str, Any], dict[str, Any]]], threshold: float) -> tuple[int, float]:
    """The number of compared steps, and the smallest difference that they can detect.

    Detected with probability POWER at noise NOISE. Infinite if a side has a single step.
    """
    sizes = [(len(head["steps"]), len(base["steps"])) for head, base in pairs]
    if all(did_same_work(head, base) for head, base in pairs):
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


def detectable_line(pairs: list[tuple[dict[str, Any], dict[str, Any]]], threshold: float) -> str:
    """A line with the smallest difference that the compared steps can detect."""
    steps, least = detectable(pairs, threshold)
    if math.isinf(least):
        return "1 step cannot detect any difference, because its noise is unknown"
    line = f"{steps} steps with {NOISE:.0%} noise detect a difference of {least:.1%} in {POWER:.0%} of runs"
    return line if least <= threshold else f"{line}, but not the threshold of {threshold:.0%}"


def _error(values: np.ndarray) -> float:
    """The standard error of a mean; infinite for a single value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def judge(ratio: float, low: float, high: float, threshold: float, explained: str) -> tuple[str, int]:
    """Verdict and exit code. A difference counts if its interval excludes 1 and it is not small."""
    if low > 1 and ratio > 1 + SMALL * threshold:
        return "slower", 1
    if high < 1 and 1 / ratio > 1 + SMALL * threshold:
        return (f"faster, as explained: {explained}", 0) if explained else ("faster, without --explained", 1)
    return "no difference", 0


def more_memory(head: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line if the rank with the highest peak memory uses more than in the baseline."""
    ours, theirs = (record["summary"].get("memory_gib", 0.0) for record in (head, base))
    if not theirs or ours <= theirs * (1 + MORE_MEMORY) or ours <= theirs + MORE_MEMORY_GIB:
        return []
    return [f"more memory: {ours:.2f} GiB on the fullest rank, {theirs:.2f} GiB in the baseline"]


def later_start(
    head: dict[str, Any], base: dict[str, Any], share: float = LATER_START, seconds: float = LATER_START_S
) -> list[str]:
    """A line if the first step starts later than in the baseline, by more than both limits."""
    ours, theirs = (float(record.get("start", {}).get("timing_s/start", 0.0)) for record in (head, base))
    if not theirs or ours <= theirs * (1 + share) or ours <= theirs + seconds:
        return []
    return [f"later start: {ours:.1f} s to the first step, {theirs:.1f} s in the baseline"]


def more_requests(head: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line if a trajectory sends more requests to the engine than in the baseline."""
    ours, theirs = ([row[REQUESTS] for row in record["steps"] if REQUESTS in row] for record in (head, base))
    if not ours or not theirs or np.mean(ours) <= np.mean(theirs) * (1 + MORE_REQUESTS):
        return []
    return [f"more requests: {np.mean(ours):.2f} per trajectory, {np.mean(theirs):.2f} in the baseline"]


def table(head: dict[str, Any], base: dict[str, Any]) -> Table:
    shown = Table("median of the steps", f"baseline {base['provenance']['commit'][:9]}", "result", "ratio")
    for name, theirs in base["summary"].items():
        ours = head["summary"].get(name)
        if isinstance(theirs, int | float) and isinstance(ours, int | float):
            shown.add_row(name, f"{theirs:.4g}", f"{ours:.4g}", f"{ours / theirs:.3f}" if theirs else "")
    return shown


if __name__ == "__main__":
    typer.run(compare)
