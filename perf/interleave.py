"""Runs a case at two commits in turns on one machine, so that its noise affects both alike.

    python perf/interleave.py sft_tiny_cpu --base HEAD~1 [--rounds 3] [section.key=value ...]

Each commit runs its own perf/bench.py from its own checkout; the rule of perf/compare.py decides. A
run that fails is told with the last lines of its log. Where the base does not have the case yet, it
runs once here, and nothing is compared. Where no file differs that a step is made of, nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import ROOT, read_case
from compare import DEFAULT_THRESHOLD, judge, later_start, more_memory, ratio_of_times, what_it_shows

from retool_mcore.cli.common import guarded
from retool_mcore.errors import ConfigError

LAST_LINES = 20  # of the log of a run that failed
# What a step is made of; the rest of a checkout cannot change its time.
MADE_OF = ("retool_mcore", "ascend", "launch", "configs", "perf", "pyproject.toml", ":!*.md", ":!*.jsonl")


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
            records: dict[Path, list[dict[str, Any]]] = {checkout: [], ROOT: []}
            words = ["--model", str(Path(model).absolute()), "--data", str(Path(data).absolute()), *(overrides or ())]
            if not has_case(checkout, case):
                _run(ROOT, case, steps, words, Path(folder) / "result.json")
                typer.echo(f"{case}: it runs; {base} does not have it, so nothing is compared.")
                return
            for _ in range(rounds):
                for root, found in records.items():
                    found.append(_run(root, case, steps, words, Path(folder) / "result.json"))
        finally:
            _git("worktree", "remove", "--force", str(checkout))
    pairs = list(zip(records[ROOT], records[checkout], strict=True))
    ratio, low, high = ratio_of_times(pairs)
    verdict, code = judge(ratio, low, high, threshold, "")
    typer.echo(
        f"{case}: time of a token {ratio:.3f} of {base}'s, interval {low:.3f} to {high:.3f}, {rounds} runs of each, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    typer.echo(what_it_shows(pairs, threshold))
    grown = [words for better in (more_memory, later_start) for words in _in_all(better, pairs)]
    for words in grown:
        typer.echo(words)
    raise typer.Exit(1 if grown else code)


def is_made_alike(root: Path, base: str) -> bool:
    """Whether every file of ``root`` that a step is made of is ``base``'s."""
    words = ["git", "diff", "--quiet", base, "--", *MADE_OF]
    return subprocess.run(words, cwd=root, capture_output=True, check=False).returncode == 0


def has_case(checkout: Path, case: str) -> bool:
    return case in tomllib.loads((checkout / "perf" / "cases.toml").read_text(encoding="utf-8"))


def _in_all(rule: Callable[..., list[str]], pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
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
