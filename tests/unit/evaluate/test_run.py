"""Sampling, judging and continuing an evaluation, with an engine that says what it is told."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import load_evaluation
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data import prompt_format
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import ConfigError, DataError, RolloutError
from retool_mcore.evaluate.cases import Case, evaluate_many
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.run import CaseSamples, SampleFile, Settings, make_report, sample_all, seeded
from retool_mcore.evaluate.servers import SpreadEngine, TokenSampler
from retool_mcore.reward.answer import judge as compare
from retool_mcore.rollout.engine import EngineTurn, EngineUnavailable, Sampling, TurnRequest, trajectory_seed
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import TextOnly
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.run.folder import lock_run

ROOT = Path(__file__).parents[3]
PROBLEMS = [
    Problem(id=number, messages=[{"role": "user", "content": f"{number} + {number}?"}], truth=str(2 * number))
    for number in range(3)
]
N = 4


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(tokenizer_rows())


@pytest.fixture
def settings() -> Settings:
    return Settings.of(load_evaluation(ROOT / "configs/rl_tiny_cpu.toml"), N, tool=False)


class Says:
    """Answers every prompt from a list, in order of the requests; an outage for None."""

    def __init__(self, tokenizer, answers: Sequence[str | None]) -> None:
        self.tokenizer, self.answers, self.asked = tokenizer, list(answers), 0
        self.seeds: dict[str, int | None] = {}

    async def generate(self, request: TurnRequest) -> EngineTurn:
        self.asked += 1
        self.seeds[request.trajectory_id] = request.sampling.seed
        answer = self.answers.pop(0)
        if answer is None:
            raise EngineUnavailable("gone")
        ids = self.tokenizer.encode(f"\\boxed{{{answer}}}<|im_end|>", add_special_tokens=False)
        return EngineTurn(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop")


async def judge(trajectory: Trajectory, problem: Problem, text: str) -> bool:
    answer = trajectory.answer
    return answer is not None and (await asyncio.to_thread(compare, answer, problem.truth)).equivalent


def job_of(engine: Any, settings: Settings, samples: SampleFile, problems=PROBLEMS, name="m"):
    sampler = TokenSampler(TextOnly(engine.tokenizer), settings, problems)
    sampler.engine = SpreadEngine([engine])
    case = Case(name=name, model="m", tool=False)
    return CaseSamples(case=case, problems=problems, settings=settings, samples=samples), sampler


async def run(
    tokenizer,
    settings: Settings,
    samples: SampleFile,
    answers: Sequence[str | None],
    problems=PROBLEMS,
) -> Says:
    engine = Says(tokenizer, answers)
    await sample_all([job_of(engine, settings, samples, problems)], judge=judge, sandbox=None, concurrency=12)
    return engine


# Problem 0: always right; 1: right twice, the wrong ones differ; 2: right once, outvoted.
ANSWERS = ["0", "00", "0.0", "$0$", "2", "2.0", "5", "6", "4", "7", "7", "07"]


async def test_the_report_counts_what_was_said(tokenizer, settings, tmp_path: Path):
    samples = SampleFile(tmp_path, settings.identity())
    await run(tokenizer, settings, samples, ANSWERS)
    report = make_report(PROBLEMS, settings, samples)
    assert [row["correct"] for row in report["per_problem"]] == [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, False, False],
    ]
    assert report["accuracy"] == pytest.approx(7 / 12)
    assert report["scores"]["pass@1"] == pytest.approx(7 / 12)
    assert report["scores"]["pass@4"] == 1.0
    assert report["scores"]["worst@4"] < report["scores"]["maj@4"] < report["scores"]["best@4"]
    assert report["behavior"]["behavior/stop/finished"] == 1.0
    json.dumps(report)


def test_a_sample_is_drawn_as_the_validation_of_a_run_draws_it():
    """Of a held-out row: tests/engine/test_agent_loop.py has the seed, test_verl_worker.py the
    sampling.
    """
    own = ["validation.temperature=0.7", "validation.top_p=0.9", "run.seed=3", "rollout.temperature=0.5"]
    settings = Settings.of(load_evaluation(ROOT / "configs/rl_tiny_cpu.toml", own), N, tool=True)
    drawn = seeded(settings, replace(PROBLEMS[2], id=5), 1)
    assert drawn == Sampling(temperature=0.7, top_p=0.9, seed=trajectory_seed(3, 5, 1))


async def test_every_sample_has_a_seed_of_its_own_that_comes_back(tokenizer, settings, tmp_path: Path):
    """With one seed for all samples of a problem an engine that heeds it would answer n times the
    same.
    """

    async def seeds(name: str, seed: int) -> dict[str, int | None]:
        samples = SampleFile(tmp_path / name, settings.identity())
        return (await run(tokenizer, replace(settings, seed=seed), samples, ANSWERS)).seeds

    first = await seeds("first", 0)
    assert len(first) == len(set(first.values())) == 3 * N and None not in first.values()
    assert await seeds("again", 0) == first
    assert not set(first.values()) & set((await seeds("other", 1)).values())


def test_a_seed_reaches_the_server():
    request = TurnRequest(
        token_ids=[1], max_new_tokens=2, stop_token_ids=[3], sampling=Sampling(seed=77), trajectory_id="t"
    )
    assert SglangEngine("http://127.0.0.1:1").body(request)["sampling_params"]["sampling_seed"] == 77


async def test_an_evaluation_that_was_killed_continues(tokenizer, settings, tmp_path: Path):
    samples = SampleFile(tmp_path, settings.identity())
    await run(tokenizer, settings, samples, ANSWERS)
    whole = samples.path.read_bytes()
    cut = whole[: whole.rindex(b"\n", 0, -1) + 40]  # the last line is half there
    samples.path.write_bytes(cut)
    again = SampleFile(tmp_path, settings.identity())
    assert len(again.rows) == 3 * N - 1
    engine = await run(tokenizer, settings, again, ["7"])
    assert engine.asked == 1
    assert samples.path.read_bytes().count(b"\n") == 3 * N
    assert make_report(PROBLEMS, settings, again) == make_report(
        PROBLEMS, settings, SampleFile(tmp_path, settings.identity())
    )


def test_a_second_evaluation_into_the_same_folder_waits_for_the_first(tmp_path: Path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    case = Case(name="base", model="base", tool=False)
    with lock_run(tmp_path / "out"), pytest.raises(ConfigError, match=r"in use by process \d+.*or name another folder"):
        evaluate_many(
            load_evaluation(ROOT / "configs/rl_tiny_cpu.toml"),
            [case],
            data=[problems],
            out=tmp_path / "out",
            url="http://127.0.0.1:9",
        )
    assert not (tmp_path / "out" / "base").exists()


@pytest.mark.parametrize("recorded", ["2024-02-03", None])
def test_an_evaluation_asks_on_the_day_of_the_models_run_or_of_its_own_start(
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
            raise InterruptedError("before a server is asked")

    for zone in ("Etc/GMT+12", "Pacific/Kiritimati"):  # never on one day
        with monkeypatch.context() as clock, pytest.raises(InterruptedError):
            clock.setenv("TZ", zone)
            time.tzset()
            prompt_format._today.cache_clear()
            evaluate_many(
                load_evaluation(ROOT / "configs/rl_tiny_cpu.toml"),
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


def test_other_settings_are_not_mixed_in(settings, tmp_path: Path):
    SampleFile(tmp_path, settings.identity())
    with pytest.raises(ConfigError, match=r"with sampling.top_p = 1.0, and this one has 0.6"):
        SampleFile(tmp_path, {**settings.identity(), "sampling": {**settings.identity()["sampling"], "top_p": 0.6}})
    with pytest.raises(ConfigError, match=r"with seed = 0, and this one has 1"):
        SampleFile(tmp_path, replace(settings, seed=1).identity())


async def test_a_sample_dropped_once_is_sampled_again(tokenizer, settings, tmp_path: Path):
    samples = SampleFile(tmp_path, settings.identity())
    engine = await run(tokenizer, settings, samples, [None, *ANSWERS])
    assert engine.asked == 3 * N + 1
    assert len(samples.rows) == 3 * N


async def test_an_outage_that_lasts_is_an_error_and_keeps_what_is_finished(tokenizer, settings, tmp_path: Path):
    samples = SampleFile(tmp_path, settings.identity())
    with pytest.raises(
        RolloutError, match="1 of 12 samples were dropped 2 times by an outage; the first: m, problem 0"
    ):
        await run(tokenizer, settings, samples, [None, None, *ANSWERS[1:]])
    assert len(SampleFile(tmp_path, settings.identity()).rows) == 3 * N - 1


async def test_a_prompt_over_the_budget_is_refused_before_anything_is_sampled(tokenizer, settings, tmp_path: Path):
    samples = SampleFile(tmp_path, settings.identity())
    problem = Problem(id=7, messages=[{"role": "user", "content": "9" * 500}], truth="1")
    with pytest.raises(DataError, match="problem 7: the prompt has"):
        await run(tokenizer, settings, samples, [], [problem])
