"""Evaluations with a real server: the command, concurrent cases, an API, verl's estimators."""

import json
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
from tests.unit.evaluate.test_endpoint import ScriptedApi, chat, evaluate
from tests.unit.evaluate.test_endpoint import server as api  # noqa: F401  a fixture
from tests.unit.evaluate.test_stats import made_up

CONFIG = Path(__file__).parents[2] / "configs/rl_tiny_cpu.toml"


def write_problems(folder: Path, count: int) -> Path:
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(count)]
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_models_are_scored_with_one_server_and_a_second_run_starts_none(tmp_path: Path):
    """Two models of one shape with other weights. Then the first one gets the second's weights."""
    for seed, name in enumerate(("first", "second")):
        write_model(tmp_path / name, build_tokenizer(tokenizer_rows()), seed=seed)
    write_problems(tmp_path, 4)
    words = ["eval", str(CONFIG), "--model", "first", "--data", "problems.jsonl", "--out", "out", "--n", "2"]
    arguments = [*words, "--model", "b=second", "--tool", "both"]
    command = [sys.executable, "-m", "retool_mcore", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("first", "first_text", "b", "b_text"):
        assert name in done.stdout
        report = json.loads((tmp_path / "out" / name / "report.json").read_text())
        assert (report["problems"], report["n"], report["tool"]) == (4, 2, not name.endswith("_text"))
        assert len((tmp_path / "out" / name / "samples.jsonl").read_text().splitlines()) == 8
    log = tmp_path / "out" / "server.log"
    assert log.read_text(errors="replace").count("server_args=ServerArgs") == 1
    log.unlink()
    again = forked.run("retool_mcore", *arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert not log.exists(), "a finished evaluation needs no server"
    shutil.rmtree(tmp_path / "first")
    shutil.copytree(tmp_path / "second", tmp_path / "first")
    refused = forked.run("retool_mcore", *words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "error: out/first has an evaluation with weights =" in refused.stderr


def samples(out: Path, name: str) -> dict[tuple[int, int], Any]:
    rows = [json.loads(line) for line in (out / name / "samples.jsonl").read_text().splitlines()]
    return {(row["problem"], row["sample"]): row["response_ids"] for row in rows}


def test_side_by_side_cases_have_the_samples_of_single_ones(server: SglangServer, model_dir: Path, tmp_path: Path):
    config = load_evaluation(CONFIG, ["sandbox.min_level=rlimits", "rollout.max_response_tokens=48"])
    cases = [Case(name="tool", model=str(model_dir)), Case(name="text", model=str(model_dir), tool=False)]
    data, order = [write_problems(tmp_path, 6)], list[str]()

    def run(out: Path, *cases: Case) -> None:
        evaluate_many(
            config, cases, data=data, out=out, n=2, url=server.url, on_sample=lambda name, right: order.append(name)
        )

    run(tmp_path / "both", *cases)
    switches = sum(before != after for before, after in pairwise(order))
    assert switches > 1, f"one case after the other: {order}"
    for case in cases:
        run(tmp_path / "single", case)
        both, single = (samples(tmp_path / out, case.name) for out in ("both", "single"))
        assert len(single) == 12 and both == single
        assert len(set(map(tuple, single.values()))) > 6, "samples that are all alike show nothing"


def test_a_call_of_an_api_runs_in_the_sandbox_and_its_result_goes_back(
    api: ScriptedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    api.script = [chat(None, "print(123 + 456)"), chat("It is \\boxed{579}.")]
    code, output, report = evaluate(api, tmp_path)
    assert (code, report["accuracy"]) == (0, 1.0), output
    (path, first, key), (_, second, _) = api.requests
    assert (path, key, first["model"]) == ("/v1/chat/completions", "Bearer sk-test", "org/served")
    assert (first["top_p"], first["tools"][0]["function"]["name"]) == (0.6, "code_interpreter")
    result = second["messages"][-1]
    assert (result["tool_call_id"], result["content"].strip()) == ("call_0_x", "579")


@pytest.mark.parametrize(("problems", "k"), [(5, 2), (3, 8), (2, 30)])  # k: samples of each
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
