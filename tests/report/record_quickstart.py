"""Makes tests/report/quickstart/ from a finished quickstart's folder: its texts, without weights.

python -m tests.report.record_quickstart runs/quickstart

Numbers keep six digits, and rows lose what no test reads: 300 kB are enough.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

TO = Path(__file__).with_name("quickstart")
RUNS = ("sft", "tool_rl", "text_rl")
EVALUATIONS = tuple(f"{name}{text}" for name in RUNS for text in ("", "_text"))
LEFT_OUT = ("val-core/", "prompt_length/", "length/", "tool/", "val/length/", "val/tool/")


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items() if not key.startswith(LEFT_OUT)}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


def record(root: Path) -> None:
    shutil.rmtree(TO, ignore_errors=True)
    for name in RUNS:
        source, to = root / name, TO / name
        to.mkdir(parents=True)
        for file in ("config.toml", "start.jsonl", "environment.json"):
            if (source / file).exists():
                shutil.copy(source / file, to / file)
        rows = [shortened(json.loads(line)) for line in (source / "metrics.jsonl").read_text().splitlines()]
        (to / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for file in [*source.glob("checkpoints/*/state.json"), source / "export" / "config.json"]:
            target = to / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for file in ("seed", "stages.json"):
        shutil.copy(root / file, TO / file)
    for name in EVALUATIONS:
        report = json.loads((root / "evaluation" / name / "report.json").read_text())
        for row in report["per_problem"]:
            del row["extracted"]
        report["scores"] = {key: value for key, value in report["scores"].items() if key.startswith("mean@")}
        (TO / "evaluation" / name).mkdir(parents=True)
        (TO / "evaluation" / name / "report.json").write_text(json.dumps(shortened(report)) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
