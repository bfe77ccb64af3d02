"""Runs' folders made for a test, with no more in them than a case needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

NOW_S = 1_800_000_000.0
QUICKSTART = Path(__file__).parents[2] / "report" / "quickstart"


def write_run(folder: Path, *, rows: Sequence[dict[str, Any]] = (), kind: str = "rl", **sections: Any) -> Path:
    """A run's folder with these rows; ``sections`` are added to the smallest config.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "run": {"name": folder.name, "root": str(folder.parent), "platform": "cpu"},
        "train": {"steps": 10},
        "model": {"path": "models/start"},
    }
    if kind == "rl":
        settings["rollout"] = {"tools": ["code_interpreter"]}
    for name, table in sections.items():
        settings[name] = {**settings.get(name, {}), **table}
    (folder / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    write_rows(folder, rows)
    return folder


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def steps(count: int, seconds: float = 10.0, **metrics: float) -> list[dict[str, float]]:
    """Rows of ``count`` steps, the newest written at NOW_S."""
    return [{"step": n, "unix_s": NOW_S - (count - n) * seconds, **metrics} for n in range(1, count + 1)]


def write_evaluation(
    folder: Path, model: str, right: Sequence[int], *, n: int = 4, tool: bool = True, data: str = "held_out.parquet"
) -> Path:
    """A report of `retool eval`: ``right`` of each problem's ``n`` samples are."""
    mean = sum(right) / len(right) / n
    report = {
        "model": model,
        "data": data,
        "problems": len(right),
        "n": n,
        "tool": tool,
        "scores": {f"mean@{n}": mean, f"mean@{n}/low": mean - 0.05, f"mean@{n}/high": mean + 0.05},
        "per_problem": [
            {"id": index, "truth": str(index), "correct": [sample < count for sample in range(n)]}
            for index, count in enumerate(right)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder
