"""`retool eval` as a user runs it: the real server, two models, with the tool and without, and a
second run at once.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from tests import forked
from tests.terminal import lines_on_terminal

# A stage, the model's bar, the table, a note.
OURS = re.compile(r"(starting|second|model +tool mean@2|Intervals are 95 %|narrows it|note: |wrote )")

CONFIG = Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml"


def retool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retool_mcore", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape with other weights, and four problems."""
    folder = tmp_path_factory.mktemp("eval")
    tokenizer = build_tokenizer(tokenizer_rows())
    for seed, name in enumerate(("first", "second")):
        write_model(folder / name, tokenizer, seed=seed)
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(4)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_models_are_scored_with_one_server_and_a_second_run_starts_none(folder: Path):
    arguments = ("eval", str(CONFIG), "--model", "first", "--model", "b=second", "--data", "problems.jsonl")
    arguments += ("--out", "out", "--n", "2", "--tool", "both")
    done = retool(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ["first", "first_text", "b", "b_text"]
    assert [name for name in (*names, "mean@2", "95 % of mean") if name not in done.stdout] == []
    for name in names:
        report = json.loads((folder / "out" / name / "report.json").read_text())
        assert (report["problems"], report["n"], report["tool"]) == (4, 2, not name.endswith("_text"))
        assert len((folder / "out" / name / "samples.jsonl").read_text().splitlines()) == 8
        assert "| mean@2 | " in (folder / "out" / name / "report.md").read_text()
    assert "Intervals are 95 % Wilson intervals over the 4 problems." in done.stdout  # random weights solve none
    compared = retool("eval", "compare", "out/first", "out/b", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    assert "paired over 4 problems" in compared.stdout
    log = folder / "out" / "server.log"
    assert log.read_text(errors="replace").count("server_args=ServerArgs") == 1
    log.unlink()
    again = retool(*arguments, cwd=folder)
    assert again.returncode == 0, again.stderr[-3000:]
    assert not log.exists(), "a finished evaluation needs no server"


def test_other_weights_under_the_same_name_are_another_evaluation(folder: Path):
    shutil.rmtree(folder / "first")
    shutil.copytree(folder / "second", folder / "first")
    done = retool(
        *("eval", str(CONFIG), "--model", "first", "--data", "problems.jsonl", "--out", "out", "--n", "2"), cwd=folder
    )
    assert done.returncode == 2
    assert "error: out/first holds an evaluation with weights =" in done.stderr


@pytest.mark.long
def test_without_a_configuration_the_papers_rollout_is_used(folder: Path):
    """On a terminal, behind proxies that do not answer: the screen has our lines only, and the
    server on this machine is reached past them.
    """
    arguments = ("--model", "second", "--data", "problems.jsonl", "--n", "2", "--protocol", "retool")
    dead = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "retool_mcore", "eval", *arguments, "rollout.max_response_tokens=64"]
    code, lines = lines_on_terminal(command, cwd=folder, env=dead)
    assert code == 0, lines[-20:]
    shown = [number for number, line in enumerate(lines) if line.startswith("the first prompt, as second sees it:")]
    assert len(shown) == 1 and "What is 0 + 0?" in lines[lines.index("<|im_start|>assistant") - 1]
    rest = lines[: shown[0]] + lines[lines.index("<|im_start|>assistant") + 1 :]
    foreign = [line for line in rest if not OURS.match(line)]
    assert not foreign, "\n".join(foreign[:40])
    report = json.loads((folder / "runs" / "eval" / "second" / "report.json").read_text())
    assert (report["protocol"], report["n"], report["problems"]) == ("retool", 2, 4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "missing", "--data", "problems.jsonl"), "missing is no model directory"),
        (("--model", "second", "--data", "missing.jsonl"), "missing.jsonl: cannot be read"),
        (("--model", "second", "--model", "x/second", "--data", "problems.jsonl"), "several models are called second"),
        (("--model", "second", "--data", "problems.jsonl", "rollout.top_p=2"), "rollout.top_p = 2"),
    ],
)
def test_a_users_mistake_is_one_line(folder: Path, arguments: tuple[str, ...], told: str):
    done = forked.run("retool_mcore", "eval", CONFIG, *arguments, "--out", "other", cwd=folder)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
