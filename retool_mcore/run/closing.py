"""What a run says when it has ended: what it has made, how good that is, and what comes next."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.config.shared import CONFIG_FILE
from retool_mcore.run.best import read_best
from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics


def closing_lines(config: RunConfig) -> Iterator[str]:
    """For people, of a run that has ended and is exported, if it is to be."""
    run = config.run.dir
    best = read_best(run) if config.best.metric else None
    which = f": {best.words()}" if best is not None else ""
    saved = complete_checkpoints(run / "checkpoints")
    export = run / "export"
    if config.checkpoint.export and export.is_dir():
        yield f"exported {export}{which or f', of step {saved[-1].step}' if saved else ''}"
    elif saved:
        yield f"saved {saved[-1].path}{which}"
    metrics = run / "metrics.jsonl"
    if said := _validation(read_metrics(metrics) if metrics.is_file() else []):
        yield said
    quoted = shlex.quote(str(run))
    yield f"next: retool report {quoted} --out {_file(run, 'report.html')}"
    yield f"      retool view {quoted} --out {_file(run, 'view.html')}"
    if config.checkpoint.export:
        yield f"      {_use_of(config, export)}"


def _validation(rows: list[dict[str, float]]) -> str:
    row = next((row for row in reversed(rows) if "val/accuracy" in row or "val_loss" in row), None)
    return "" if row is None else f"validation at step {int(row['step'])}: {_value(row)}"


def _value(row: Mapping[str, float]) -> str:
    if "val_loss" in row:
        return f"val_loss {row['val_loss']:.4f}"
    low, high = row.get("val/accuracy/low"), row.get("val/accuracy/high")
    interval = "" if low is None or high is None else f" (95 %: {low:.3f} to {high:.3f})"
    return f"accuracy {row['val/accuracy']:.3f}{interval}"


def _use_of(config: RunConfig, export: Path) -> str:
    if not isinstance(config, RlConfig):
        return f"retool rl CONFIG model.path={shlex.quote(str(export))}"
    parts = (config.run.dir / CONFIG_FILE, export, config.run.dir / "eval")
    source, model, out = (shlex.quote(str(path)) for path in parts)
    return f"retool eval {source} --model {model} --out {out}"


def _file(run: Path, name: str) -> str:
    return shlex.quote(str(run / name))
