"""Compares a result of perf/bench.py with a baseline: a table, and an exit code for a gate.

    python perf/compare.py result.json [baseline.json] [--explained "why it is faster now"]

It compares the seconds per token of the steps: the ratio of the medians and its bootstrap interval.
Exit codes:

- 0: no difference beyond the case's threshold, or faster with --explained.
- 1: slower, or faster without --explained. A step that lost half its work is faster, too.
- 2: not comparable, because hardware, settings that change the work, or tokens differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench import ROOT, STOPPED, hardware_name, read_case
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from retool_mcore.cli.common import guarded
from retool_mcore.errors import ConfigError

CONFIDENCE = 0.95
DEFAULT_THRESHOLD = 0.03
TOKENS_MAY_DIFFER = 0.01  # share of the measured tokens per step
NOT_COUNTED = ("time_checkpoint_s", "time_validate_s")  # what a run does only in some steps
RESAMPLES = 10_000


@guarded
def compare(
    result: Annotated[Path, typer.Argument(help="what perf/bench.py wrote")],
    baseline: Annotated[Path | None, typer.Argument(help="default: perf/baselines/CASE.HARDWARE.json")] = None,
    explained: Annotated[str, typer.Option(help="why it is faster; then faster passes")] = "",
) -> None:
    head = read_result(result)
    base = read_result(baseline or default_baseline(head))
    require_comparable(head, base)
    threshold = float(read_case(head["case"]).get("threshold", DEFAULT_THRESHOLD))
    ratio, low, high = ratio_of_medians(token_times(head), token_times(base))
    Console().print(table(head, base))
    verdict, code = judge(low, high, threshold, explained)
    typer.echo(
        f"time of a token: {ratio:.4f} of the baseline's, {CONFIDENCE:.0%} interval {low:.4f} to {high:.4f}, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    raise typer.Exit(code)


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


def require_comparable(head: dict[str, Any], base: dict[str, Any]) -> None:
    """Raise ConfigError unless both runs did the same work on the same hardware."""
    for what, ours, theirs in (
        ("case", head["case"], base["case"]),
        ("hardware", hardware_name(head), hardware_name(base)),
        ("precision", head["provenance"]["settings"]["model"]["fp8"], base["provenance"]["settings"]["model"]["fp8"]),
    ):
        if ours != theirs:
            raise ConfigError(f"not comparable: {what} is {ours}, the baseline's is {theirs}.")
    ours, theirs = (record["lengths"]["total"] / len(record["steps"]) for record in (head, base))
    if abs(ours - theirs) > TOKENS_MAY_DIFFER * theirs:
        raise ConfigError(f"not comparable: {ours:.0f} tokens a step, the baseline's are {theirs:.0f}.")


def token_times(record: dict[str, Any]) -> list[float]:
    """Seconds per token of each measured step."""
    left_out = [sum(row.get(name, 0.0) for name in NOT_COUNTED) for row in record["steps"]]
    return [(row["time_step_s"] - s) / row["tokens"] for row, s in zip(record["steps"], left_out, strict=True)]


def ratio_of_medians(head: list[float], base: list[float]) -> tuple[float, float, float]:
    """median(head) / median(base), and the bounds of its bootstrap interval."""

    def ratio(ours: np.ndarray, theirs: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(ours, axis=axis) / np.median(theirs, axis=axis)

    interval = bootstrap(
        (head, base),
        ratio,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(ratio(np.array(head), np.array(base))), float(interval.low), float(interval.high)


def judge(low: float, high: float, threshold: float, explained: str) -> tuple[str, int]:
    """A difference counts when the whole interval lies beyond the threshold."""
    if low > 1 + threshold:
        return "slower", 1
    if high < 1 - threshold:
        return (f"faster, as explained: {explained}", 0) if explained else ("faster, and nobody has said why", 1)
    return "no difference", 0


def table(head: dict[str, Any], base: dict[str, Any]) -> Table:
    shown = Table("median of the steps", f"baseline {base['provenance']['commit'][:9]}", "result", "ratio")
    for name, theirs in base["summary"].items():
        ours = head["summary"].get(name)
        if isinstance(theirs, int | float) and isinstance(ours, int | float):
            shown.add_row(name, f"{theirs:.4g}", f"{ours:.4g}", f"{ours / theirs:.3f}" if theirs else "")
    return shown


if __name__ == "__main__":
    typer.run(compare)
