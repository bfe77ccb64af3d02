"""Compares two commits by alternating runs of a case on one machine, so that noise affects both.

    python perf/interleave.py sft_tiny_cpu --base HEAD~1 [--rounds 3] [section.key=value ...]

Each commit runs its own perf/bench.py in its own checkout, and the rules of perf/compare.py decide.
A difference counts only if a second measurement with as many rounds also finds it, because the load
of another process can look like a difference. If a run fails, the error has the last lines of its
log. If the base does not have the case yet, the case runs once and nothing is compared. If no file
that affects a step differs, nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import ROOT, read_case
from compare import (
    DEFAULT_THRESHOLD,
    detectable_line,
    judge,
    later_start,
    more_memory,
    more_requests,
    ratio_of_times,
)

from retool_mcore.cli.common import guarded
from retool_mcore.errors import ConfigError

LAST_LINES = 20  # of a failed run's log
# The files that can change the time of a step.
PERF_FILES = ("bench.py", "cases.toml", "rl_alone.py", "scripted.py", "scripted_loop.yaml", "scripted_tail_loop.yaml")
STEP_FILES = (
    "retool_mcore", "ascend", "launch", "configs", "pyproject.toml", *(f"perf/{name}" for name in PERF_FILES),
    ":!*.md",
)  # fmt: skip

LATER = partial(later_start, share=0.3, seconds=5.0)  # lower limits, because every round must find it
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]  # records of perf/bench.py: this checkout's and the base's


@guarded
def interleave(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    base: Annotated[str, typer.Option(help="the commit to compare with")] = "HEAD~1",
    rounds: Annotated[int, typer.Option(min=1, help="runs of each commit")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="measured steps per run")] = 10,
    model: Annotated[str, typer.Option(help="model directory")] = "runs/task/model",
    data: Annotated[str, typer.Option(help="data file")] = "runs/task/sft_train.parquet",
) -> None:
    threshold = float(read_case(case).get("threshold", DEFAULT_THRESHOLD))
    if has_same_step(ROOT, base):
        typer.echo(f"{case}: no file that affects a step differs from {base}, so nothing is compared.")
        return
    with tempfile.TemporaryDirectory(prefix="base_") as folder:
        checkout = Path(folder) / "base"
        _git("worktree", "add", "--detach", str(checkout), base)
        try:
            if not (checkout / "perf" / "bench.py").is_file():
                raise ConfigError(f"--base {base} has no perf/bench.py. Choose a later commit.")
            words = ["--model", str(Path(model).absolute()), "--data", str(Path(data).absolute()), *(overrides or ())]
            result = Path(folder) / "result.json"
            if not has_case(checkout, case):
                _run(ROOT, case, steps, words, result)
                typer.echo(f"{case}: it runs, but {base} does not have it, so nothing is compared.")
                return
            code = confirm(
                lambda: alternate(lambda root: _run(root, case, steps, words, result), ROOT, checkout, rounds),
                lambda pairs: report(f"{case}: seconds per token {{:.3f}} of {base}'s", pairs, threshold),
            )
        finally:
            _git("worktree", "remove", "--force", str(checkout))
    raise typer.Exit(code)


def alternate(run: Callable[[Path], dict[str, Any]], head: Path, base: Path, rounds: int) -> Pairs:
    """Run both checkouts in each round, in alternating order, so that drift cancels."""
    pairs: Pairs = []
    for number in range(rounds):
        order = (base, head) if number % 2 == 0 else (head, base)
        records = {root: run(root) for root in order}
        pairs.append((records[head], records[base]))
    return pairs


def confirm(measure: Callable[[], Pairs], differences: Callable[[Pairs], list[str]]) -> int:
    """Return 1 if two independent measurements find the same kind of difference, else 0."""
    found = differences(measure())
    if not found:
        return 0
    typer.echo("Measuring again, because a disturbed run can look like a difference.")
    again = differences(measure())
    both = [name for name in found if name in again]
    typer.echo(f"found twice: {', '.join(both)}" if both else "not found again: no difference")
    return 1 if both else 0


def report(head_line: str, pairs: Pairs, threshold: float) -> list[str]:
    """Print the result and return the kinds of difference that count."""
    ratio, low, high = ratio_of_times(pairs)
    verdict, code = judge(ratio, low, high, threshold, "")
    typer.echo(
        f"{head_line.format(ratio)}, interval {low:.3f} to {high:.3f}, {len(pairs)} runs of each, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    typer.echo(detectable_line(pairs, threshold))
    found = [verdict] if code else []
    rules = (("more memory", more_memory), ("a later start", LATER), ("more requests", more_requests))
    for name, rule in rules:
        lines = [rule(head, base) for head, base in pairs]
        if all(lines):  # the rule applies in every round
            typer.echo(lines[-1][-1])
            found.append(name)
    return found


def has_same_step(root: Path, base: str) -> bool:
    """Whether every file of ``root`` that can change a step is the same in ``base``."""
    words = ["git", "diff", "--quiet", base, "--", *STEP_FILES]
    return subprocess.run(words, cwd=root, capture_output=True, check=False).returncode == 0


def has_case(checkout: Path, case: str) -> bool:
    return case in tomllib.loads((checkout / "perf" / "cases.toml").read_text(encoding="utf-8"))


def _run(root: Path, case: str, steps: int, words: list[str], out: Path) -> dict[str, Any]:
    argv = [sys.executable, "-W", "ignore", "perf/bench.py", case, "--steps", str(steps), "--out", str(out), *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}  # takes precedence over the installed package
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{case} failed in {root}: {failure(done.stdout + done.stderr, out.with_suffix('.log'))}")
    return json.loads(out.read_text(encoding="utf-8"))


def failure(output: str, log: Path) -> str:
    """The last error in a run's log, and the last lines of its output and its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return "\n".join([*errors[-1:], *output.splitlines()[-3:], f"The last lines of {log.name}:", *lines[-LAST_LINES:]])


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"git {' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    typer.run(interleave)
