"""Runs a case at two commits in turns on one machine, so that its noise affects both alike.

    python perf/interleave.py sft_tiny_cpu --base HEAD~1 [--rounds 3] [section.key=value ...]

Each commit runs its own perf/bench.py from its own checkout, first and second by turns; the rule of
perf/compare.py decides. What it finds counts when as many rounds again find the same: a neighbour
that disturbs a run looks like a difference, too. A run that fails is told with the last lines
of its log. Where the base does not have the case yet, it runs once here, and nothing is compared.
Where no file differs that a step is made of, nothing runs.
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
    judge,
    later_start,
    more_memory,
    more_requests,
    ratio_of_times,
    what_it_shows,
)

from retool_mcore.cli.common import guarded
from retool_mcore.errors import ConfigError

LAST_LINES = 20  # of the log of a run that failed
# What a step of a case is made of; the rest of a checkout cannot change its time.
OF_PERF = ("bench.py", "cases.toml", "rl_alone.py", "scripted.py", "scripted_loop.yaml")
MADE_OF = (
    "retool_mcore", "ascend", "launch", "configs", "pyproject.toml", *(f"perf/{name}" for name in OF_PERF), ":!*.md",
)  # fmt: skip

LATER = partial(later_start, share=0.3, seconds=5.0)  # of starts in turns, each round of which must find it
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]  # records of perf/bench.py: this checkout's and the base's


@guarded
def interleave(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    *,
    base: Annotated[str, typer.Option(help="the commit to compare with")] = "HEAD~1",
    rounds: Annotated[int, typer.Option(min=1, help="runs of each")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="measured steps of a run")] = 10,
    model: Annotated[str, typer.Option(help="model directory")] = "runs/task/model",
    data: Annotated[str, typer.Option(help="data file")] = "runs/task/sft_train.parquet",
) -> None:
    threshold = float(read_case(case).get("threshold", DEFAULT_THRESHOLD))
    if is_made_alike(ROOT, base):
        typer.echo(f"{case}: nothing that a step is made of differs from {base}'s, so nothing is compared.")
        return
    with tempfile.TemporaryDirectory(prefix="base_") as folder:
        checkout = Path(folder) / "base"
        _git("worktree", "add", "--detach", str(checkout), base)
        try:
            if not (checkout / "perf" / "bench.py").is_file():
                raise ConfigError(f"{base} has no perf/bench.py: name a later commit with --base.")
            words = ["--model", str(Path(model).absolute()), "--data", str(Path(data).absolute()), *(overrides or ())]
            result = Path(folder) / "result.json"
            if not has_case(checkout, case):
                _run(ROOT, case, steps, words, result)
                typer.echo(f"{case}: it runs; {base} does not have it, so nothing is compared.")
                return
            code = confirmed(
                lambda: in_turns(lambda root: _run(root, case, steps, words, result), ROOT, checkout, rounds),
                lambda pairs: tell(f"{case}: time of a token {{:.3f}} of {base}'s", pairs, threshold),
            )
        finally:
            _git("worktree", "remove", "--force", str(checkout))
    raise typer.Exit(code)


def in_turns(run: Callable[[Path], dict[str, Any]], head: Path, base: Path, rounds: int) -> Pairs:
    """The records of each round: base and head, then head and base, so that a drift cancels."""
    pairs: Pairs = []
    for number in range(rounds):
        order = (base, head) if number % 2 == 0 else (head, base)
        records = {root: run(root) for root in order}
        pairs.append((records[head], records[base]))
    return pairs


def confirmed(measure: Callable[[], Pairs], judged: Callable[[Pairs], list[str]]) -> int:
    """1 if two measurements, each by itself, find the same: what ``judged`` names of each."""
    found = judged(measure())
    if not found:
        return 0
    typer.echo("Measured once more, since a single run that was disturbed looks like this, too.")
    again = judged(measure())
    both = [name for name in found if name in again]
    typer.echo(f"found twice: {', '.join(both)}" if both else "not found again: no difference")
    return 1 if both else 0


def tell(head_line: str, pairs: Pairs, threshold: float) -> list[str]:
    """Prints what is measured; returns the kinds of difference that count."""
    ratio, low, high = ratio_of_times(pairs)
    verdict, code = judge(ratio, low, high, threshold, "")
    typer.echo(
        f"{head_line.format(ratio)}, interval {low:.3f} to {high:.3f}, {len(pairs)} runs of each, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    typer.echo(what_it_shows(pairs, threshold))
    found = [verdict] if code else []
    rules = (("more memory", more_memory), ("a later start", LATER), ("more requests", more_requests))
    for name, rule in rules:
        if words := _in_all(rule, pairs):
            typer.echo(words[-1])
            found.append(name)
    return found


def is_made_alike(root: Path, base: str) -> bool:
    """Whether every file of ``root`` that a step is made of is ``base``'s."""
    words = ["git", "diff", "--quiet", base, "--", *MADE_OF]
    return subprocess.run(words, cwd=root, capture_output=True, check=False).returncode == 0


def has_case(checkout: Path, case: str) -> bool:
    return case in tomllib.loads((checkout / "perf" / "cases.toml").read_text(encoding="utf-8"))


def _in_all(rule: Callable[..., list[str]], pairs: Pairs) -> list[str]:
    """What a rule says of the last round, if it says something of every one."""
    found = [rule(head, base) for head, base in pairs]
    return found[-1] if all(found) else []


def _run(root: Path, case: str, steps: int, words: list[str], out: Path) -> dict[str, Any]:
    argv = [sys.executable, "-W", "ignore", "perf/bench.py", case, "--steps", str(steps), "--out", str(out), *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}  # found before the installed package, which is this checkout
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{case} failed in {root}: {why(done.stdout + done.stderr, out.with_suffix('.log'))}")
    return json.loads(out.read_text(encoding="utf-8"))


def why(said: str, log: Path) -> str:
    """The run's own last error, if its log has one, and the last lines of both."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return "\n".join([*errors[-1:], *said.splitlines()[-3:], f"The last lines of {log.name}:", *lines[-LAST_LINES:]])


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"git {' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    typer.run(interleave)
