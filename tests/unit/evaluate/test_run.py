"""Sampling, judging and resuming an evaluation, with a scripted engine."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retool_mcore.config import EvaluationConfig, load_evaluation
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data import prompt_format
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import ConfigError, DataError, RolloutError
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.run import CaseSamples, SampleFile, identity_of, make_report, sample_all
from retool_mcore.evaluate.servers import SpreadEngine, TokenSampler
from retool_mcore.reward.answer import judge as compare
from retool_mcore.rollout.engine import EngineTurn, EngineUnavailable, Sampling, TurnRequest, trajectory_seed
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import TextOnly
from retool_mcore.rollout.sglang_http import SglangEngine

ROOT = Path(__file__).parents[3]
PROBLEMS = [
    Problem(id=number, messages=[{"role": "user", "content": f"{number} + {number}?"}], truth=str(2 * number))
    for number in range(3)
]
N = 4


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(tokenizer_rows())


CASE = Case(name="m", model="m", tool=False)


def config_of(*settings: str) -> EvaluationConfig:
    return load_evaluation(ROOT / "configs/rl_tiny_cpu.toml", settings)


def samples_in(folder: Path, problems: Sequence[Problem] = PROBLEMS, *settings: str) -> CaseSamples:
    config = config_of(*settings)
    samples = SampleFile(folder, identity_of(config, CASE, problems))
    return CaseSamples(case=CASE, config=config, problems=problems, n=N, samples=samples)


class ScriptedEngine:
    """Answers every prompt from a list, in order of the requests; an outage for None."""

    def __init__(self, tokenizer, answers: Sequence[str | None]) -> None:
        self.tokenizer, self.answers, self.requests = tokenizer, list(answers), 0

    async def generate(self, request: TurnRequest) -> EngineTurn:
        self.requests += 1
        answer = self.answers.pop(0)
        if answer is None:
            raise EngineUnavailable("gone")
        ids = self.tokenizer.encode(f"\\boxed{{{answer}}}<|im_end|>", add_special_tokens=False)
        return EngineTurn(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop")


async def judge(trajectory: Trajectory, problem: Problem, text: str) -> bool:
    answer = trajectory.answer
    assert text == rf"\boxed{{{answer}}}", "without control tokens"
    return answer is not None and (await asyncio.to_thread(compare, answer, problem.truth)).equivalent


async def run(tokenizer, work: CaseSamples, answers: Sequence[str | None]) -> ScriptedEngine:
    engine = ScriptedEngine(tokenizer, answers)
    sampler = TokenSampler(TextOnly(tokenizer), work)
    sampler.engine = SpreadEngine([engine])
    await sample_all([(work, sampler)], judge=judge, sandbox=None, concurrency=12)
    return engine


# Problem 0: always right; 1: right twice, the wrong ones differ; 2: right once, outvoted.
ANSWERS = ["0", "00", "0.0", "$0$", "2", "2.0", "5", "6", "4", "7", "7", "07"]


async def test_the_report_counts_right_and_wrong_samples(tokenizer, tmp_path: Path):
    work = samples_in(tmp_path)
    await run(tokenizer, work, ANSWERS)
    report = make_report(work)
    assert [row["correct"] for row in report["per_problem"]] == [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, False, False],
    ]
    second = {"id": 1, "truth": "2", "correct": [True, True, False, False], "extracted": ["2", "2.0", "5", "6"]}
    assert report["per_problem"][1] == second
    assert (report["problems"], report["n"], report["tool"]) == (3, 4, False)
    assert report["accuracy"] == pytest.approx(7 / 12)
    assert report["scores"]["pass@1"] == pytest.approx(7 / 12)
    assert report["scores"]["pass@4"] == 1.0
    assert report["scores"]["maj@4"] == pytest.approx(0.6113, abs=1e-4), "2 and 2.0 are one vote"
    assert report["scores"]["worst@4"] < report["scores"]["maj@4"] < report["scores"]["best@4"]
    assert report["behavior"]["behavior/stop/finished"] == 1.0
    json.dumps(report)


def test_a_sample_has_the_settings_and_the_seed_of_a_validation(tmp_path: Path):
    settings = ["validation.temperature=0.7", "validation.top_p=0.9", "run.seed=3", "rollout.temperature=0.5"]
    sampling = samples_in(tmp_path, PROBLEMS, *settings).sampling(replace(PROBLEMS[2], id=5), 1)
    assert sampling == Sampling(temperature=0.7, top_p=0.9, seed=trajectory_seed(3, 5, 1))
    request = TurnRequest(
        token_ids=[1], max_new_tokens=2, stop_token_ids=[3], sampling=Sampling(seed=77), trajectory_id="t"
    )
    assert SglangEngine("http://127.0.0.1:1").body(request)["sampling_params"]["sampling_seed"] == 77


async def test_an_evaluation_that_was_killed_resumes(tokenizer, tmp_path: Path):
    work = samples_in(tmp_path)
    await run(tokenizer, work, ANSWERS)
    whole = work.samples.path.read_bytes()
    cut = whole[: whole.rindex(b"\n", 0, -1) + 40]  # half of the last line
    work.samples.path.write_bytes(cut)
    again = samples_in(tmp_path)
    assert len(again.samples.rows) == 3 * N - 1
    engine = await run(tokenizer, again, ["7"])
    assert engine.requests == 1
    assert work.samples.path.read_bytes().count(b"\n") == 3 * N
    assert make_report(again) == make_report(samples_in(tmp_path))


@pytest.mark.parametrize("recorded", ["2024-02-03", None])
def test_a_template_gets_the_date_of_the_models_run_or_of_the_evaluation(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch, recorded: str | None
):
    problems, model, notes = tmp_path / "problems.jsonl", tmp_path / "model", list[str]()
    problems.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    write_model(model, tokenizer, seed=0)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text('{{ strftime_now("%d.%m.%Y") }}' + template)
    if recorded is not None:
        (model / FORMAT_FILE).write_text(json.dumps({"date": recorded}))

    def note(text: str) -> None:
        notes.append(text)
        if "sees it:" in text:
            raise InterruptedError("before a request")

    for zone in ("Etc/GMT+12", "Pacific/Kiritimati"):  # never on one day
        with monkeypatch.context() as clock, pytest.raises(InterruptedError):
            clock.setenv("TZ", zone)
            time.tzset()
            prompt_format._today.cache_clear()
            evaluate_many(
                config_of(),
                [Case(name="model", model=str(model), tool=False)],
                data=[problems],
                out=tmp_path / "out",
                url="http://127.0.0.1:9",
                on_note=note,
            )
    time.tzset()
    prompt_format._today.cache_clear()
    first, second = (note.partition("sees it:\n")[2] for note in notes if "sees it:" in note)
    assert first == second and (recorded is None) != first.startswith("03.02.2024")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("validation.top_p=0.6", "with sampling.top_p = 1.0, but this one has 0.6"),
        ("run.seed=1", "with seed = 0, but this one has 1"),
        ("validation.temperature=0.5", "with sampling.temperature = 1.0, but this one has 0.5"),
        ("data.max_prompt_tokens=99", "with max_prompt_tokens = 160, but this one has 99"),
        ("rollout.max_response_tokens=99", "with limits.max_response_tokens = "),
        ("rollout.calls_per_turn=all", "with calls_per_turn = 'first', but this one has 'all'"),
        ("reward.function=x:y", "with reward.function = None, but this one has 'x:y'"),
    ],
)
def test_samples_of_other_settings_are_not_mixed(tmp_path: Path, setting: str, message: str):
    samples_in(tmp_path)
    with pytest.raises(ConfigError, match=message):
        samples_in(tmp_path, PROBLEMS, setting)


def test_a_model_without_tools_gets_none_of_an_mcp_server():
    rollout = config_of('rollout.mcp={s={url="http://127.0.0.1:9/mcp"}}').rollout
    assert rollout.tool and not rollout.with_tools(False).tool


async def test_an_outage_is_retried_and_a_lasting_one_keeps_finished_samples(tokenizer, tmp_path: Path):
    work = samples_in(tmp_path / "once")
    assert (await run(tokenizer, work, [None, *ANSWERS])).requests == 3 * N + 1 and len(work.samples.rows) == 3 * N
    message = "1 of 12 samples were dropped 2 times by an outage; the first: m, problem 0"
    with pytest.raises(RolloutError, match=message):
        await run(tokenizer, samples_in(tmp_path), [None, None, *ANSWERS[1:]])
    assert len(samples_in(tmp_path).samples.rows) == 3 * N - 1


async def test_a_prompt_over_the_budget_is_refused_before_anything_is_sampled(tokenizer, tmp_path: Path):
    problem = Problem(id=7, messages=[{"role": "user", "content": "9" * 500}], truth="1")
    with pytest.raises(DataError, match="problem 7: the prompt has"):
        await run(tokenizer, samples_in(tmp_path, [problem]), [])
