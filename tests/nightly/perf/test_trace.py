"""A step's trace: phases end when the step does, turns follow each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_folder(folder: Path) -> Path:
    row = {"step": 3, "unix_s": 1002.5, "timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 3.0}
    row |= {"timing_s/other": 1.0, "timing_s/testing": 2.0, "timing_s/metrics": 0.5, "timing_s/between_steps": 0.25}
    validation = {"step": 3, "val/accuracy": 0.5, "unix_s": 1002.5}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(validation)}\n")
    turn = {"engine_s": 2.0, "tool_s": 0.5, "tokens": 9, "kind": "tool_call", "results": [{"ok": True}]}
    last = turn | {"results": [], "tool_s": 0.0, "kind": "answer"}
    rows = [
        {"step": 3, "partition": "train", "started_unix_s": 990.5, "turns": [turn, last]},
        {"step": 2, "partition": "train", "started_unix_s": 980.0, "turns": [last]},
        {"step": 3, "partition": "val", "started_unix_s": 1001.0, "turns": [last]},
    ]
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trace(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "perf/trace.py", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_phases_and_turns_stand_where_they_happened(tmp_path: Path):
    out = tmp_path / "trace.json"
    done = trace(str(run_folder(tmp_path)), "--step", "3", "--out", str(out))
    assert done.returncode == 0 and "1 trajectories" in done.stdout, done.stderr
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    spans = {(e["pid"], e["name"], e["ts"] / 1e6): e["dur"] / 1e6 for e in events if e["dur"]}
    assert spans == pytest.approx(
        {
            (1, "gen", 990.0): 6.0,
            (1, "update_actor", 996.0): 3.0,
            (1, "other", 999.0): 1.0,
            (1, "testing", 1000.0): 2.0,
            (1, "metrics", 1002.0): 0.5,
            (2, "model", 990.5): 2.0,
            (2, "tool", 992.5): 0.5,
            (2, "model", 993.0): 2.0,
        }
    )


def test_a_step_that_is_not_there_is_told(tmp_path: Path):
    done = trace(str(run_folder(tmp_path)), "--step", "9")
    assert done.returncode == 2 and "has no step 9. Choose one from 3 to 3" in done.stderr.replace("\n", " ")
