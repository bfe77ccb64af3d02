"""Runs several evaluations of the same problems, model by model.

The cases of one model run concurrently. If the next model has the same architecture, the servers
keep running and only load its weights.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.config import EvaluationConfig, build_config
from retool_mcore.config.rl import Reward
from retool_mcore.data.files import replacing
from retool_mcore.data.layouts import Columns
from retool_mcore.data.prompt_format import pin_date, recorded_format
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.compare import REPORT
from retool_mcore.evaluate.endpoint import Api, TextSampler
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import Case, CaseSamples, SampleFile, identity_of, make_report, sample_all
from retool_mcore.evaluate.servers import Servers, TokenSampler
from retool_mcore.evaluate.table import markdown
from retool_mcore.model.files import read_config
from retool_mcore.platforms.base import detect_platform
from retool_mcore.reward.response import Response
from retool_mcore.reward.user_function import load_user_reward
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.trackers import Trackers, check_trackers
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from retool_mcore.sandbox.supervisor.slots import remove_stale

__all__ = ["Case", "evaluate_many"]

# The defaults of `retool eval` without a configuration file.
DEFAULTS = "the defaults of `retool eval`"
MAX_PROMPT_TOKENS = 2048
MAX_RESPONSE_TOKENS = 16_384
SERVER_WAIT_S = 10.0

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
    on_stage: OnStage = lambda description: None,
    on_sample: OnSample = lambda name, correct: None,
    on_note: OnNote = lambda sentence: None,
) -> dict[str, dict[str, Any]]:
    """Evaluate each case with the settings of [validation]; return the reports by case name.

    Writes ``out/<case>/report.json`` and logs its numbers to the run's trackers in ``out``. Each
    model gets plain problems in its recorded prompt format (data/prompt_format.py). The cases of
    one model run concurrently, so list models of the same architecture one after the other.

    ``data``, ``n``: problem files and samples per problem; default to those of [validation].
    ``columns``: the column layout of the problem files.
    ``url``: URL of a running SGLang server, which serves the only model; no server is started then.
    ``endpoint``: an OpenAI-compatible server; the cases' models are its model names.

    Raises ReToolError subclasses. Running the same evaluation again resumes it.
    """
    check_trackers(config)
    n = n or config.validation.n
    data = data or [Path(path) for path in config.validation.files]
    models = list(dict.fromkeys(case.model for case in cases))
    reports: dict[str, dict[str, Any]] = {}

    with ExitStack() as stack:
        stack.enter_context(lock_run(out, "name another folder in --out"))  # samples.jsonl may have one writer only
        stack.enter_context(own_tmpdir(out, clean=partial(remove_stale, young_s=0)))
        server = Api(config, endpoint) if endpoint else stack.enter_context(Servers(config, out, url, models))
        runner = stack.enter_context(asyncio.Runner())  # one event loop, because all cases share a sandbox
        if not any((out / case.name / REPORT).exists() for case in cases):
            server.begin(models[0])  # starts the engine while this process reads and renders the problems
        read = read_problems(data, limit, columns)
        # By default, half of the samples may wait for the interpreter while the engines are full.
        at_once = concurrency or 2 * config.rollout.max_running_requests * len(server)
        sandbox: Sandbox | None = None
        for model in models:
            problems = [problem.in_format(recorded_format(model)) for problem in read]
            works: list[CaseSamples] = []
            for case in (case for case in cases if case.model == model):
                samples = SampleFile(out / case.name, identity_of(config, case, problems, endpoint))
                works.append(CaseSamples(case=case, config=config, problems=problems, n=n, samples=samples))
            for work in works:
                total = len(problems) * n
                on_start(work.case.name, total - len(work.missing), total)
            if todo := [work for work in works if work.missing]:
                server.begin(model)
                days = [pin_date(work.samples.path.parent, model) for work in todo]
                jobs = [(work, server.sampler(work, day)) for work, day in zip(todo, days, strict=True)]
                for work, sampler in jobs:
                    for note in sampler.notes(work):
                        on_note(note)
                if sandbox is None and any(work.case.tool for work in todo):
                    on_stage("starting the sandbox")
                    sandbox = open_sandbox_of(config, runner, stack)
                on_stage(server.stage(model))
                urls = server.urls_of(model)
                on_stage("sampling the first answers")
                runner.run(_sample(config, jobs, urls, sandbox=sandbox, concurrency=at_once, on_sample=on_sample))
            for work in works:
                reports[work.case.name] = write_report(work, out, data)
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
    async with AsyncExitStack() as clients:
        for _, sampler in jobs:
            await sampler.connect(urls, clients)
        judge = partial(is_right, config.reward)
        await sample_all(jobs, judge=judge, sandbox=sandbox, concurrency=concurrency, on_sample=on_sample)


def open_sandbox_of(config: EvaluationConfig, runner: asyncio.Runner, stack: ExitStack) -> Sandbox:
    """Open the sandbox of [sandbox] until ``stack`` closes.

    Without a trainer, all CPUs are free. A local sandbox therefore has as many workers as there are
    CPUs, or sandbox.workers if that is more. Raises ConfigError and SandboxUnavailable like
    ``Sandbox.open``.
    """
    spec = config.sandbox
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
    stack.callback(lambda: runner.run(sandbox.close()))  # before opening, which may fail
    runner.run(sandbox.open())
    return sandbox


def write_report(work: CaseSamples, out: Path, data: Sequence[Path]) -> dict[str, Any]:
    """Write a case's report to its folder and log its numbers to the trackers."""
    name = work.case.name
    report = {"model": work.case.model, "data": ", ".join(map(str, data)), **make_report(work)}
    _track(work.config, out, name, report)
    with replacing(out / name / REPORT) as draft:
        Path(draft).write_text(json.dumps(report, indent=1), encoding="utf-8")
    with replacing(out / name / "report.md") as draft:
        Path(draft).write_text(markdown(report), encoding="utf-8")
    return report


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
    scored = await asyncio.to_thread(load_user_reward(reward.function), response)
    return bool(scored["acc"])


def default_config(model: str, overrides: Sequence[str], *, has_files: bool = True) -> EvaluationConfig:
    """The default settings of an evaluation on this machine, without trackers.

    These are 8 turns, 2048 prompt and 16384 response tokens, temperature 1.0, and top_p 0.6 in
    validation. Both limits are reduced for a model with a shorter context. ``has_files``:
    whether the model's files are readable; if not, its context is assumed to be long enough. Raises
    ConfigError for a bad override.
    """
    platform = detect_platform()
    devices = platform.device_count() if platform.host.has_devices else 1
    known = read_config(model) if has_files else {}
    longest = known.get("max_position_embeddings") or MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    prompt = min(MAX_PROMPT_TOKENS, longest // 2)
    response = min(MAX_RESPONSE_TOKENS, longest - prompt)
    tree: dict[str, Any] = {
        "run": {"name": "eval", "platform": platform.name, "trackers": []},
        "cluster": {"gpus_per_node": devices},
        "model": {"path": model, "dtype": platform.training.dtypes[0]},
        "data": {"max_prompt_tokens": prompt},
        "rollout": {"max_turns": 8, "max_response_tokens": response},
        "validation": {"n": 8, "top_p": 0.6},
    }
    return build_config(EvaluationConfig, tree, DEFAULTS, overrides)


def model_of_server(url: str) -> str:
    """The model path that a running SGLang server reports. Raises ConfigError if there is none."""

    async def ask() -> dict[str, Any]:
        async with SglangEngine(url, timeout_s=SERVER_WAIT_S, retry_s=SERVER_WAIT_S) as engine:
            return await engine.model_info()

    info = asyncio.run(ask())
    path = info.get("tokenizer_path") or info.get("model_path")
    if not isinstance(path, str):
        raise ConfigError(f"{url} does not report its model. Use --model DIRECTORY --url {url}")
    return path
