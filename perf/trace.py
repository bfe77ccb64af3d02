"""Writes one RL step as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    python perf/trace.py runs/NAME --step 12 --out step12.json

The trace shows the trainer's phases, and below them a row for each recorded trajectory with its
model turns and tool calls. It needs only files that every run writes: metrics.jsonl and
trajectories/. Runs record only some of their trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from retool_mcore.cli.common import guarded
from retool_mcore.errors import DataError

ORDER = (  # phases of a step in verl's trainer
    *("gen", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "save_checkpoint", "update_weights", "other"),
)
AFTER = ("testing", "metrics")  # phases between the step and its row of metrics
TRAINER, ROLLOUT = 1, 2  # process numbers of the trace


@guarded
def trace(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    *,
    step: Annotated[int, typer.Option(min=1, help="number of the step")],
    out: Annotated[Path, typer.Option(help="file for the trace")] = Path("trace.json"),
) -> None:
    rows: dict[float, dict[str, float]] = {}
    for row in _lines(run / "metrics.jsonl"):
        rows.setdefault(row["step"], row)  # a validation's row comes after its step's
    if step not in rows:
        raise DataError(
            f"{run / 'metrics.jsonl'} has no step {step}. Choose one from {min(rows, default=0)} to "
            f"{max(rows, default=0)}."
        )
    files = sorted((run / "trajectories").glob("*.jsonl"))
    recorded = [row for path in files for row in _lines(path) if row["step"] == step and row["partition"] == "train"]
    events = [*_names(), *phases(rows[step])]
    for number, trajectory in enumerate(sorted(recorded, key=lambda row: row["started_unix_s"]), start=1):
        events += turns(trajectory, number)
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    typer.echo(f"wrote {out}: {len(events)} events, {len(recorded)} trajectories")


def phases(row: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The step's phases in order, up to the row of metrics."""
    start_s = row["unix_s"] - row["timing_s/step"] - sum(row.get(f"timing_s/{name}", 0.0) for name in AFTER)
    for name in (*ORDER, *AFTER):
        length_s = row.get(f"timing_s/{name}", 0.0)
        yield _slice(name, start_s, length_s, TRAINER, 1)
        start_s += length_s


def turns(trajectory: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Model turns and tool calls of one trajectory, without the short gaps between them."""
    start_s = trajectory["started_unix_s"]
    for turn in trajectory["turns"]:
        yield _slice("model", start_s, turn["engine_s"], ROLLOUT, number, tokens=turn["tokens"], kind=turn["kind"])
        start_s += turn["engine_s"]
        if turn["results"]:
            yield _slice("tool", start_s, turn["tool_s"], ROLLOUT, number, ok=[each["ok"] for each in turn["results"]])
            start_s += turn["tool_s"]


def _slice(name: str, start_s: float, length_s: float, process: int, row: int, **more: Any) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": length_s * 1e6}
    return {"name": name, "ph": "X", "pid": process, "tid": row, "args": more, **times}


def _names() -> Iterator[dict[str, Any]]:
    for process, name in ((TRAINER, "trainer"), (ROLLOUT, "rollout, recorded trajectories")):
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the folder of a run.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    typer.run(trace)
