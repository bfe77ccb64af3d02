"""Evaluations with a real server: the command, an API, concurrent cases, verl's estimators."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import load_evaluation
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.evaluate.stats import sizes, summarize
from retool_mcore.rollout.server import SglangServer
from tests import forked
from tests.terminal import lines_on_terminal
from tests.unit.evaluate.test_endpoint import ScriptedApi, chat, evaluate
from tests.unit.evaluate.test_endpoint import server as api  # noqa: F401  a fixture
from tests.unit.evaluate.test_stats import made_up

# A stage, the model's bar, the table, a note.
OURS = re.compile(r"(starting|second|model +tool mean@2|Intervals are 95 %|.*narrows the interval|note: |wrote )")
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
    compared = forked.run("retool_mcore", "eval", "compare", "out/first", "out/b", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    assert "paired over 4 problems" in compared.stdout
    log = folder / "out" / "server.log"
    assert log.read_text(errors="replace").count("server_args=ServerArgs") == 1
    log.unlink()
    again = forked.run("retool_mcore", *arguments, cwd=folder)
    assert again.returncode == 0, again.stderr[-3000:]
    assert not log.exists(), "a finished evaluation needs no server"


def test_other_weights_under_the_same_name_are_another_evaluation(folder: Path):
    shutil.rmtree(folder / "first")
    shutil.copytree(folder / "second", folder / "first")
    words = ("eval", CONFIG, "--model", "first", "--data", "problems.jsonl", "--out", "out", "--n", "2")
    done = forked.run("retool_mcore", *words, cwd=folder)
    assert done.returncode == 2
    assert "error: out/first has an evaluation with weights =" in done.stderr


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


def samples(out: Path, name: str) -> dict[tuple[int, int], Any]:
    rows = [json.loads(line) for line in (out / name / "samples.jsonl").read_text().splitlines()]
    return {(row["problem"], row["sample"]): row["response_ids"] for row in rows}


def test_side_by_side_cases_have_the_samples_of_single_ones(server: SglangServer, model_dir: Path, tmp_path: Path):
    config = load_evaluation(CONFIG, ["sandbox.min_level=rlimits", "rollout.max_response_tokens=48"])
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(6)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = [Case(name="tool", model=str(model_dir)), Case(name="text", model=str(model_dir), tool=False)]
    order: list[str] = []

    def evaluate(out: Path, *cases: Case) -> None:
        evaluate_many(
            config,
            cases,
            data=[problems],
            out=out,
            n=2,
            url=server.url,
            on_sample=lambda name, right: order.append(name),
        )

    evaluate(tmp_path / "both", *cases)
    switches = sum(before != after for before, after in pairwise(order))
    assert switches > 1, f"one case after the other: {order}"
    for case in cases:
        evaluate(tmp_path / "single", case)
        both, single = (samples(tmp_path / out, case.name) for out in ("both", "single"))
        assert len(single) == 12 and both == single
        assert len(set(map(tuple, single.values()))) > 6, "samples that are all alike show nothing"


def test_a_call_of_the_server_runs_in_the_sandbox_and_its_result_goes_back(
    api: ScriptedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    api.script = [chat(None, "print(123 + 456)"), chat("It is \\boxed{579}.")]
    code, output, report = evaluate(api, tmp_path)
    assert code == 0, output
    assert report["accuracy"] == 1.0
    (path, first, key), (_, second, _) = api.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer sk-test")
    assert (first["model"], first["top_p"], first["max_tokens"]) == ("org/served", 0.6, 16384)
    assert first["tools"][0]["function"]["name"] == "code_interpreter"
    assistant, tool = second["messages"][-2:]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "call_0_x"
    assert tool["content"].strip() == "579"


SHAPES = [(5, 2), (3, 8), (2, 30)]  # problems, samples of each


@pytest.mark.parametrize(("problems", "k"), SHAPES)
def test_mean_best_worst_and_maj_equal_verls(verl_on_cpu: None, problems: int, k: int):
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    rows = made_up(problems, k, seed=k)
    infos = {
        "acc": [score for row in rows for score in row.scores],
        "pred": [vote for row in rows for vote in row.votes],
    }
    ids = [str(index) for index in range(problems) for _ in range(k)]
    theirs = process_validation_metrics(["here"] * problems * k, ids, infos)["here"]["acc"]
    ours = summarize(rows)
    assert ours[f"mean@{k}"] == pytest.approx(theirs[f"mean@{k}"], abs=1e-12)
    for n in sizes(k):
        for name in ("best", "worst", "maj"):
            assert ours[f"{name}@{n}"] == pytest.approx(theirs[f"{name}@{n}/mean"], abs=1e-12)
