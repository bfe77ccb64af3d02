"""What a user brings, by the commands of its page: own problems, an own reward, a model behind an
API, a held-out split. tests/nightly/e2e/test_two_tools.py has own conversations with two tools.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.data.tasks import make_task
from retool_mcore.run.metrics import read_metrics
from tests.unit.docs.test_pages import ROOT, blocks
from tests.unit.evaluate.test_endpoint import InProcessSandbox, ScriptedApi, chat, server

__all__ = ["server"]  # the fixture

OWN = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(3)]


def command(page: str, *parts: str) -> list[str]:
    """The words behind `retool` of the page's only command that has these parts."""
    lines = "".join(blocks(ROOT / "docs" / page, "bash")).replace("\\\n", " ").splitlines()
    [line] = [line for line in lines if line.startswith("retool ") and all(part in line for part in parts)]
    return shlex.split(line)[1:]


def replaced(words: list[str], places: dict[str, Any]) -> list[str]:
    """``words`` with what is the reader's own in the places where the page has an example."""
    assert set(places) <= set(words), f"{words} has no {set(places) - set(words)}"
    return [str(places.get(word, word)) for word in words]


def here(*words: str) -> str:
    """The output of a command that runs in this process."""
    result = CliRunner().invoke(all_commands(), words)
    assert result.exit_code == 0, result.output[-3000:]
    return result.output


def retool(folder: Path, *words: str, timeout_s: float = 600) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "retool_mcore", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a clone is, with problems of the reader's own."""
    for name in ("configs", "tests", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "my_problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OWN), encoding="utf-8")
    return tmp_path


def test_a_split_of_own_problems_has_no_problem_on_both_sides(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    here(*command("data.md", "data rl", "gsm8k_60.jsonl"))
    here(*command("data.md", "data split", "--hold-out 20"))
    sides = [pq.read_table(f"data/{name}.parquet").to_pylist() for name in ("train", "held_out")]
    train, held_out = ({json.dumps(row["prompt"]) for row in side} for side in sides)
    assert (len(train), len(held_out)) == (40, 20) and not train & held_out
    assert "shared" not in here("data", "lint", "data/train.parquet", "data/held_out.parquet")


def test_a_model_behind_an_api_is_evaluated(server: ScriptedApi, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("retool_mcore.evaluate.cases.open_sandbox", lambda where, **options: InProcessSandbox())
    words = command("evaluation.md", "eval --endpoint", "--n 4")
    answers = [chat(None, "print(1 + 1)"), chat("It is \\boxed{2}."), *[chat("I do not know.")] * 11]
    server.script = [(503, {"error": {"message": "busy"}}), *answers]
    places = {"http://localhost:8000/v1": server.url, "runs/task/eval.parquet": "my_problems.jsonl"}
    output = here(*replaced(words, places), "--concurrency", "1")
    assert re.search(r"served-name +on +0\.0\d\d", output), output
    report = json.loads((folder / "runs/eval/served-name/report.json").read_text())
    assert (report["problems"], report["n"]) == (3, 4)
    assert report["behavior"]["behavior/calls"] == pytest.approx(1 / 12)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_own_reward_decides_what_a_run_learns_from(folder: Path):
    pytest.importorskip("verl", reason="verl is not installed")
    make_task(folder / "runs/task")
    [function] = [block for block in blocks(ROOT / "docs/tool_and_reward.md", "python") if "def score" in block]
    (folder / "my_reward.py").write_text(function.partition("\nshown = ")[0], encoding="utf-8")
    words = command("tool_and_reward.md", "reward.function=my_reward:score")
    few = [
        "train.steps=1",
        "train.prompts_per_step=4",
        "train.mini_batch_prompts=4",
        "validation.every=0",
        "sandbox.min_level=rlimits",
    ]
    retool(folder, *words, *few, "model.path=runs/task/model", timeout_s=800)
    [row] = [row for row in read_metrics(folder / "runs/my_reward/metrics.jsonl") if row["step"] == 1]
    failed = row["behavior/calls"] * (1 - row.get("behavior/executable_fraction", 1))
    assert row["reward/failed"] == pytest.approx(failed, abs=1e-6)
