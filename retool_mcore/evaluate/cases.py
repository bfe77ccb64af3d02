"""Runs several evaluations of the same problems, model by model.

The cases of one model run concurrently. If the next model has the same architecture, the servers
keep running and only load its weights.
"""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.rl import Reward
from retool_mcore.data.files import replacing
from retool_mcore.data.layouts import Columns
from retool_mcore.data.prompt_format import pin_date, recorded_format
from retool_mcore.data.tokenizer import template_of
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.compare import REPORT
from retool_mcore.evaluate.endpoint import Api, TextSampler
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import Case, CaseSamples, SampleFile, Settings, make_report, sample_all
from retool_mcore.evaluate.servers import Servers, TokenSampler, config_of
from retool_mcore.evaluate.table import markdown
from retool_mcore.reward.own import open_own_reward
from retool_mcore.reward.response import Response
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.trackers import Trackers, check_trackers
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from retool_mcore.sandbox.supervisor.slots import remove_stale

__all__ = ["Case", "evaluate_many"]

OnStart = Callable[[str, int, int], None]  # case, number of samples already finished, total number
OnStage = Callable[[str], None]  # description of the stage that begins
OnNote = Callable[[str], None]  # a sentence for the user
OnSample = Callable[[str, bool], None]  # case, whether the answer is correct


def evaluate_many(
    config: EvaluationConfig,
    cases: Sequence[Case],
    *,
    data: Sequence[Path] = (),
    columns: Columns | None = None,
    out: Path,
    n: int | None = None,
    concurrency: int | None = None,
    limit: int | None = None,
    url: str | None = None,
    endpoint: str | None = None,
    on_start: OnStart = lambda name, finished, total: None,
    on_stage: OnStage = lambda words: None,
    on_sample: OnSample = lambda name, correct: None,
    on_note: OnNote = lambda words: None,
) -> dict[str, dict[str, Any]]:
    """Evaluate each case with the settings of [validation]; return the reports by case name.

    Writes ``out/<case>/report.json`` and logs its numbers to the run's trackers in ``out``. Each
    model gets plain problems in its recorded prompt format (data/prompt_format.py). The cases of
    one model run concurrently, so list models of the same architecture one after the other.

    ``data``, ``n``: problem files and samples per problem; default to those of [validation].
    ``columns``: the column layout of the problem files.
    ``url``: a running SGLang server with the only model; no server is started then.
    ``endpoint``: an OpenAI-compatible server; the cases' models are its model names.

    Raises ReToolError subclasses. Running the same evaluation again resumes it.
    """
    check_trackers(config)
    n = n or config.validation.n
    data = data or [Path(path) for path in config.validation.files]
    of_model: dict[str, list[Case]] = {}
    for case in cases:
        of_model.setdefault(case.model, []).append(case)
    if url is not None and len(of_model) > 1:
        raise ConfigError(f"{url} is one server with one model, and there are {len(of_model)} models to evaluate.")
    reports: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_folder(out))
        models = Api(config, endpoint) if endpoint else stack.enter_context(Servers(config, out, url))
        loop = stack.enter_context(EventLoop(config))
        for model in of_model if url is endpoint is None else ():
            config_of(model)  # raises for a missing directory, before anything treats it as a hub name
        if not any((out / case.name / REPORT).exists() for case in cases):
            models.begin(cases[0].model)  # starts the engine while this process reads and renders the problems
        read = read_problems(data, limit, columns)
        # By default, half of the samples may wait for the interpreter.
        at_once = concurrency or 2 * config.rollout.max_running_requests * len(models)
        for model, group in of_model.items():
            problems = [problem.asked_in(recorded_format(model)) for problem in read]
            works: list[CaseSamples] = []
            for case in group:
                settings = Settings.of(config, n, case.tool)
                identity = identity_of(config, model, problems, endpoint) | settings.identity()
                samples = SampleFile(out / case.name, identity)
                works.append(CaseSamples(case=case, problems=problems, settings=settings, samples=samples))
            for work in works:
                total = len(problems) * n
                on_start(work.case.name, total - len(work.missing), total)
            if todo := [work for work in works if work.missing]:
                models.begin(model)
                days = [pin_date(work.samples.path.parent, model) for work in todo]
                jobs = [
                    (work, models.sampler(work.case, work.settings, problems, day))
                    for work, day in zip(todo, days, strict=True)
                ]
                for work, sampler in jobs:
                    for note in sampler.notes(work.case, problems):
                        on_note(note)
                if any(work.case.tool for work in todo):
                    loop.run(loop.open_sandbox(on_stage))
                on_stage(models.stage(model))
                urls = models.urls_of(model)
                on_stage("sampling the first answers")
                loop.run(_sample(config, jobs, urls, sandbox=loop.sandbox, concurrency=at_once, on_sample=on_sample))
            for work in works:
                report = make_report(problems, work.settings, work.samples)
                reports[work.case.name] = write_report(config, out, work.case, data, report)
    return reports


async def _sample(
    config: EvaluationConfig,
    jobs: Sequence[tuple[CaseSamples, TokenSampler | TextSampler]],
    urls: Sequence[str],
    *,
    sandbox: Sandbox | None,
    concurrency: int,
    on_sample: OnSample,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _, sampler in jobs:
            await sampler.connect(urls, stack)
        judge = partial(is_right, config.reward)
        await sample_all(jobs, judge=judge, sandbox=sandbox, concurrency=concurrency, on_sample=on_sample)


@contextmanager
def hold_folder(out: Path) -> Generator[None]:
    """Lock ``out``, because samples.jsonl may have one writer only.

    Removes the evaluation's temporary files afterwards. Raises ConfigError if the folder is locked.
    """
    with lock_run(out, "name another folder in --out"), own_tmpdir(out, clean=partial(remove_stale, young_s=0)):
        yield


def write_report(
    config: EvaluationConfig, out: Path, case: Case, data: Sequence[Path], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a case's report to its folder and log its numbers to the trackers."""
    name, report = case.name, {"model": case.model, "data": ", ".join(map(str, data)), **numbers}
    _track(config, out, name, report)
    with replacing(out / name / REPORT) as draft:
        Path(draft).write_text(json.dumps(report, indent=1), encoding="utf-8")
    with replacing(out / name / "report.md") as draft:
        Path(draft).write_text(markdown(report), encoding="utf-8")
    return report


class EventLoop:
    """The event loop and sandbox that all cases share, because opening a sandbox takes seconds."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self.sandbox: Sandbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._runner:
            if self.sandbox is not None:
                self._runner.run(self.sandbox.close())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Like ``asyncio.run``, on this loop."""
        self._runner.run(work)

    async def open_sandbox(self, on_stage: OnStage = lambda words: None) -> None:
        """Open the sandbox of [sandbox], unless it is open.

        Without a trainer, all CPUs are free. A local sandbox therefore has as many workers as there
        are CPUs, or sandbox.workers if that is more. Raises ConfigError and SandboxUnavailable like
        ``Sandbox.open``.
        """
        if self.sandbox is not None:
            return
        on_stage("starting the sandbox")
        spec = self._config.sandbox
        workers = spec.workers
        if spec.where == ["local"]:
            workers = max(workers, len(os.sched_getaffinity(0)))
        sandbox = open_sandbox(
            spec.where,
            min_level=spec.min_level,
            workers=workers,
            sessions=max(spec.sessions, workers) if spec.sessions else 0,
            python=spec.python,
            preload=spec.preload,
        )
        self.sandbox = sandbox  # set first, so that it is closed even if opening fails
        await sandbox.open()


def _track(config: EvaluationConfig, out: Path, name: str, report: Mapping[str, Any]) -> None:
    """Log a case's numbers when it is first reported. The step counts the reports in ``out``."""
    if not config.run.trackers or (out / name / REPORT).exists():
        return
    before = len(list(out.glob("*/report.json")))
    numbers = {f"eval/{name}/{key}": value for part in ("scores", "behavior") for key, value in report[part].items()}
    trackers = Trackers(config, out, name=f"{config.run.name}_eval", resumed_step=before)
    trackers.log(numbers, before + 1)
    trackers.close()


async def is_right(reward: Reward, trajectory: Trajectory, problem: Problem, text: str) -> bool:
    """Whether the answer is correct, by the default reward or by ``reward.function``."""
    response = Response(
        data_source="",
        truth=problem.truth,
        answer=trajectory.answer,
        text=text,
        behavior=Behavior.of(trajectory).to_json(),
        timeout_s=reward.timeout_s,
    )
    if not reward.function:
        return await asyncio.to_thread(lambda: response.right)
    scored = await asyncio.to_thread(open_own_reward(reward.function), response)
    return bool(scored["acc"])


def identity_of(
    config: EvaluationConfig, model: str, problems: Sequence[Problem], endpoint: str | None = None
) -> dict[str, Any]:
    """The identity of a sample file: the weights, the problems and the judge."""
    weights = sorted(Path(model).glob("*.safetensors"))
    text = json.dumps([[problem.messages, problem.truth] for problem in problems])
    return {
        **({"endpoint": endpoint} if endpoint else {}),
        "model": model,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "problems": hashlib.sha256(text.encode()).hexdigest(),
        **({"reward.function": config.reward.function} if config.reward.function else {}),
        **({"template": template} if (template := template_of(config.model)) else {}),
    }
