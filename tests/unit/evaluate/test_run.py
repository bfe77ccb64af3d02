"""Reading problems; sampling, judging and resuming an evaluation with a scripted engine."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import EvaluationConfig, load_evaluation
from retool_mcore.data import prompt_format
from retool_mcore.data.prompt_format import PromptFormat
from retool_mcore.data.task_model import write_model
from retool_mcore.errors import ConfigError, DataError, RolloutError
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import CaseSamples, SampleFile, identity_of, make_report, sample_all
from retool_mcore.evaluate.servers import SpreadEngine, TokenSampler
from retool_mcore.reward.answer import judge as compare
from retool_mcore.rollout.engine import EngineTurn, EngineUnavailable, Sampling, TurnRequest, trajectory_seed
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import TextOnly, open_protocol
from retool_mcore.rollout.sglang_http import SglangEngine

CONFIG = Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml"
PROBLEMS = [
    Problem(id=number, messages=[{"role": "user", "content": f"{number} + {number}?"}], truth=str(2 * number))
    for number in range(3)
]
N = 4
CASE = Case(name="m", model="m", tool=False)


def config_of(*settings: str) -> EvaluationConfig:
    return load_evaluation(CONFIG, settings)


def samples_in(folder: Path, *settings: str, problems: Sequence[Problem] = PROBLEMS) -> CaseSamples:
    config = config_of(*settings)
    samples = SampleFile(folder, identity_of(config, CASE, problems))
    return CaseSamples(case=CASE, config=config, problems=problems, n=N, samples=samples)


class ScriptedEngine:
    """Answers every prompt from a list, in order of the requests; an outage for None."""

    def __init__(self, tokenizer: Any, answers: Sequence[str | None]) -> None:
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


async def run(tokenizer: Any, work: CaseSamples, answers: Sequence[str | None]) -> int:
    """Sample what is missing, and return the number of requests."""
    engine = ScriptedEngine(tokenizer, answers)
    sampler = TokenSampler(TextOnly(tokenizer), work)
    sampler.engine = SpreadEngine([engine])
    await sample_all([(work, sampler)], judge=judge, sandbox=None, concurrency=12)
    return engine.requests


# Problem 0: always right; 1: right twice, the wrong ones differ; 2: right once, outvoted.
ANSWERS = ["0", "00", "0.0", "$0$", "2", "2.0", "5", "6", "4", "7", "7", "07"]


async def test_the_report_counts_right_and_wrong_samples(tokenizer, tmp_path: Path):
    work = samples_in(tmp_path)
    await run(tokenizer, work, ANSWERS)
    report = make_report(work)
    assert [sum(row["correct"]) for row in report["per_problem"]] == [4, 2, 1]
    second = {"id": 1, "truth": "2", "correct": [True, True, False, False], "extracted": ["2", "2.0", "5", "6"]}
    assert report["per_problem"][1] == second
    assert (report["problems"], report["n"], report["tool"]) == (3, 4, False)
    assert report["accuracy"] == report["scores"]["pass@1"] == pytest.approx(7 / 12)
    assert report["scores"]["pass@4"] == 1.0
    assert report["scores"]["maj@4"] == pytest.approx(0.6113, abs=1e-4), "2 and 2.0 are one vote"
    assert report["behavior"]["behavior/stop/finished"] == 1.0


def test_a_sample_has_the_settings_and_the_seed_of_a_validation(tmp_path: Path):
    settings = ["validation.temperature=0.7", "validation.top_p=0.9", "run.seed=3", "rollout.temperature=0.5"]
    sampling = samples_in(tmp_path, *settings).sampling(replace(PROBLEMS[2], id=5), 1)
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
    assert await run(tokenizer, again, ["7"]) == 1
    assert work.samples.path.read_bytes().count(b"\n") == 3 * N
    assert make_report(again) == make_report(samples_in(tmp_path))


def test_a_template_gets_the_date_of_the_first_start(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch):
    problems, model, prompts = tmp_path / "problems.jsonl", tmp_path / "model", list[str]()
    problems.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    write_model(model, tokenizer, seed=0)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text('{{ strftime_now("%d.%m.%Y") }}' + template)

    def note(text: str) -> None:
        if "sees it:" in text:
            prompts.append(text)
            raise InterruptedError("before a request")

    case = Case(name="model", model=str(model), tool=False)
    for zone in ("Etc/GMT+12", "Pacific/Kiritimati"):  # never on one day
        with monkeypatch.context() as clock, pytest.raises(InterruptedError):
            clock.setenv("TZ", zone)
            time.tzset()
            prompt_format._today.cache_clear()
            url = "http://127.0.0.1:9"
            evaluate_many(config_of(), [case], data=[problems], out=tmp_path / "out", url=url, on_note=note)
    time.tzset()
    prompt_format._today.cache_clear()
    first, second = prompts
    assert first == second


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
        samples_in(tmp_path, setting)


def test_a_model_without_tools_gets_none_of_an_mcp_server():
    rollout = config_of('rollout.mcp={s={url="http://127.0.0.1:9/mcp"}}').rollout
    assert rollout.tool and not rollout.with_tools(False).tool


async def test_an_outage_is_retried_and_a_lasting_one_keeps_finished_samples(tokenizer, tmp_path: Path):
    work = samples_in(tmp_path / "once")
    assert await run(tokenizer, work, [None, *ANSWERS]) == 3 * N + 1 and len(work.samples.rows) == 3 * N
    message = "1 of 12 samples were dropped 2 times; the first: m, problem 0"
    with pytest.raises(RolloutError, match=message):
        await run(tokenizer, samples_in(tmp_path), [None, None, *ANSWERS[1:]])
    assert len(samples_in(tmp_path).samples.rows) == 3 * N - 1


async def test_a_prompt_over_the_budget_is_refused_before_anything_is_sampled(tokenizer, tmp_path: Path):
    problem = Problem(id=7, messages=[{"role": "user", "content": "9" * 500}], truth="1")
    with pytest.raises(DataError, match="problem 7: the prompt has"):
        await run(tokenizer, samples_in(tmp_path, problems=[problem]), [])


TURNS = [{"role": "user", "content": "1 + 1?"}]
BRIEF = PromptFormat(system="Be brief.", instruction="")


def test_a_bare_problem_is_asked_as_the_model_was_and_a_files_own_turns_stay(tmp_path: Path):
    def read(*rows: dict[str, Any]) -> list[Problem]:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_problems([tmp_path / "p.jsonl"])

    (bare,) = read({"problem": "1 + 1?", "answer": "2"})
    assert bare.in_format(BRIEF).messages == BRIEF.messages("1 + 1?")
    assert bare.in_format(None) == bare and bare.messages == PromptFormat().messages("1 + 1?")
    (own,) = read({"prompt": TURNS, "reward_model": {"ground_truth": "2"}})
    assert own.in_format(BRIEF).messages == TURNS
    with pytest.raises(DataError, match=r"line 1, column answer: the answer is None.* leaves such rows out"):
        read({"problem": "1 + 1?", "answer": None})
    with pytest.raises(DataError, match=r"p\.jsonl: the file has no problems"):
        read()
    with pytest.raises(DataError, match=r"line 1, column images: the row needs more than text"):
        read({"prompt": TURNS, "reward_model": {"ground_truth": "2"}, "images": ["a.png"]})


def test_the_first_prompt_is_shown_as_the_model_sees_it_after_a_warning(tmp_path: Path, tokenizer: Any):
    case = Case(name="m", model=str(tmp_path))

    def notes(messages: Any) -> list[str]:
        work = replace(samples_in(tmp_path), case=case, problems=[Problem(id=0, messages=messages, truth="2")])
        return list(TokenSampler(open_protocol("hermes", tokenizer), work).notes(work))

    (shown,) = notes(TURNS)
    assert shown.startswith("the first prompt, as m sees it:\n<|im_start|>system") and "code_interpreter" in shown
    BRIEF.write(tmp_path)
    warning, _ = notes(TURNS)
    assert 'system turn "Be brief."' in warning and "no system turn" in warning
    assert len(notes(BRIEF.messages("1 + 1?"))) == 1
