"""Runs a case at two commits in turns on one machine, so that its noise affects both alike.

    python perf/interleave.py sft_tiny_cpu --base HEAD~1 [--rounds 3] [section.key=value ...]

Each commit runs its own perf/bench.py from its own checkout; the rule of perf/compare.py decides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import ROOT, read_case
from compare import DEFAULT_THRESHOLD, judge, ratio_of_medians, token_times

from retool_mcore.cli.common import guarded
from retool_mcore.errors import ConfigError


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
    with tempfile.TemporaryDirectory(prefix="base_") as folder:
        checkout = Path(folder) / "base"
        _git("worktree", "add", "--detach", str(checkout), base)
        try:
            if not (checkout / "perf" / "bench.py").is_file():
                raise ConfigError(f"{base} has no perf/bench.py: name a later commit with --base.")
            times: dict[Path, list[float]] = {checkout: [], ROOT: []}
            words = ["--model", str(Path(model).absolute()), "--data", str(Path(data).absolute()), *(overrides or ())]
            for _ in range(rounds):
                for root in times:
                    times[root] += token_times(_run(root, case, steps, words, Path(folder) / "result.json"))
        finally:
            _git("worktree", "remove", "--force", str(checkout))
    ratio, low, high = ratio_of_medians(times[ROOT], times[checkout])
    verdict, code = judge(low, high, threshold, "")
    typer.echo(
        f"{case}: time of a token {ratio:.3f} of {base}'s, interval {low:.3f} to {high:.3f}, {rounds} runs of each, "
        f"threshold {threshold:.0%}: {verdict}"
    )
    raise typer.Exit(code)


def _run(root: Path, case: str, steps: int, words: list[str], out: Path) -> dict[str, Any]:
    argv = [sys.executable, "-W", "ignore", "perf/bench.py", case, "--steps", str(steps), "--out", str(out), *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}  # found before the installed package, which is this checkout
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{case} failed in {root}: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return json.loads(out.read_text(encoding="utf-8"))


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"git {' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    typer.run(interleave)
