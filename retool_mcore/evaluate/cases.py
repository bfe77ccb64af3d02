"""Several evaluations one after another on local servers.

When the next model has the same shape, the servers keep running and only load its weights.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.rl import Reward
from retool_mcore.data.chat import tokenizer_of
from retool_mcore.data.files import replacing
from retool_mcore.data.layouts import Columns
from retool_mcore.data.prompt_format import difference, format_of_prompts, recorded_format, shown_prompt
from retool_mcore.data.templates import template_of
from retool_mcore.data.tokenizer import decode
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import SampleFile, Settings, make_report, sample_all
from retool_mcore.evaluate.servers import Servers, SpreadEngine, architecture_of
from retool_mcore.evaluate.table import markdown
from retool_mcore.reward.own import open_own_reward
from retool_mcore.reward.response import Response
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.metrics import Behavior
from retool_mcore.rollout.protocol import ToolProtocol, protocol_of
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.run.folder import lock_run, own_tmpdir
from retool_mcore.run.trackers import Trackers, check_trackers
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox
from retool_mcore.sandbox.supervisor.state import remove_stale

OnStart = Callable[[str, int, int], None]  # case, samples finished before, samples in all
OnStage = Callable[[str], None]  # what begins, in words
OnNote = Callable[[str], None]  # a sentence for the user
OnSample = Callable[[str, bool], None]  # case, was it right


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model evaluated one way; its files go into a folder of this name."""

    name: str
    model: str
    tool: bool = True


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
    on_start: OnStart = lambda name, finished, total: None,
    on_stage: OnStage = lambda words: None,
    on_sample: OnSample = lambda name, correct: None,
    on_note: OnNote = lambda words: None,
) -> dict[str, dict[str, Any]]:
    """Evaluate each case as ``config`` validates, and return the reports by case name.

    Writes ``out/<case>/report.json``, and its numbers to the run's trackers in ``out``. ``data``
    and ``n`` default to those of [validation]; ``columns`` names those of the problems. A bare
    problem is put to each model as its run has recorded (data/prompt_format.py). Order the
    cases so that models of one shape follow each other. ``url``: a running server that already
    holds the only model; no server is started then. Raises ReToolError subclasses; run again to
    continue.
    """
    check_trackers(config)
    n = n or config.validation.n
    data = data or [Path(path) for path in config.validation.files]
    models = {case.model for case in cases}
    if url is not None and len(models) > 1:
        raise ConfigError(f"{url} is one server with one model, and there are {len(models)} models to evaluate.")
    for model in models if url is None else ():
        architecture_of(model)  # fails for a missing directory, which is not to be taken for a hub name
    read = read_problems(data, limit, columns)
    reports: dict[str, dict[str, Any]] = {}
    with hold_folder(out), Servers(config, out, url) as servers, EventLoop(config) as loop:
        for case in cases:
            settings = Settings.of(config, n, case.tool, len(servers), concurrency)
            problems = [problem.asked_in(recorded_format(case.model)) for problem in read]
            samples = SampleFile(out / case.name, identity_of(config, case.model, problems) | settings.identity())
            on_start(case.name, len(samples.rows), len(problems) * n)
            if len(samples.rows) < len(problems) * n:
                rollout = config.rollout.calling(case.tool)
                # Before the servers start, as it may fail.
                protocol = protocol_of(rollout, tokenizer_of(config.model, case.model))
                for note in notes_on_prompt(case, problems, protocol):
                    on_note(note)
                on_stage(servers.next_stage(case.model))
                work = _Work(config, case, problems, settings, samples, protocol, servers.urls_of(case.model))
                loop.run(work.run(loop, partial(on_sample, case.name), on_stage))
            report = make_report(problems, settings, samples)
            reports[case.name] = write_report(config, out, case, data, report)
    return reports


def notes_on_prompt(case: Case, problems: Sequence[Problem], protocol: ToolProtocol) -> Iterator[str]:
    """The first prompt as the model sees it, after a warning if the model's run asked otherwise."""
    asked = format_of_prompts((problem.messages for problem in problems), protocol.name if case.tool else "")
    yield from difference(case.model, asked, case.name, "docs/evaluation.md: how a problem is put to the model.")
    seen = decode(protocol.tokenizer, protocol.prompt_ids(problems[0].messages))
    yield f"the first prompt, as {case.name} sees it:\n{shown_prompt(seen)}"


@contextmanager
def hold_folder(out: Path) -> Generator[None]:
    """Hold ``out``: samples.jsonl has one writer. What it leaves in TMPDIR is gone afterwards.

    Raises ConfigError.
    """
    with lock_run(out, "name another folder in --out"), own_tmpdir(out, clean=partial(remove_stale, young_s=0)):
        yield


def write_report(
    config: EvaluationConfig, out: Path, case: Case, data: Sequence[Path], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a case's report into its folder, and its numbers to the trackers."""
    name, report = case.name, {"model": case.model, "data": ", ".join(map(str, data)), **numbers}
    _track(config, out, name, report)
    with replacing(out / name / "report.json") as draft:
        Path(draft).write_text(json.dumps(report, indent=1), encoding="utf-8")
    with replacing(out / name / "report.md") as draft:
        Path(draft).write_text(markdown(report), encoding="utf-8")
    return report


class EventLoop:
    """The event loop of all cases, and the sandbox that lives in it: opening one takes seconds."""

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._runner:
            if self._sandbox is not None:
                self._runner.run(self._sandbox.close())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """As ``asyncio.run``."""
        self._runner.run(work)

    async def sandbox(self, on_stage: OnStage = lambda words: None) -> Sandbox:
        """The sandbox of [sandbox], opened for the first case that asks.

        Raises ConfigError and SandboxUnavailable as ``Sandbox.open``.
        """
        if self._sandbox is None:
            on_stage("starting the sandbox")
            spec = self._config.sandbox
            self._sandbox = open_sandbox(
                spec.where,
                min_level=spec.min_level,
                workers=spec.workers,
                sessions=spec.sessions,
                python=spec.python,
                preload=spec.preload,
            )
            await self._sandbox.open()
        return self._sandbox


def _track(config: EvaluationConfig, out: Path, name: str, report: Mapping[str, Any]) -> None:
    """Log a case's numbers when it is first reported; its step is its number in the folder."""
    if not config.run.trackers or (out / name / "report.json").exists():
        return
    before = len(list(out.glob("*/report.json")))
    numbers = {f"eval/{name}/{key}": value for part in ("scores", "behavior") for key, value in report[part].items()}
    trackers = Trackers(config, out, name=f"{config.run.name}_eval", resumed_step=before)
    trackers.write(before + 1, numbers)
    trackers.close()


@dataclass(frozen=True)
class _Work:
    config: EvaluationConfig
    case: Case
    problems: Sequence[Problem]
    settings: Settings
    samples: SampleFile
    protocol: ToolProtocol
    urls: Sequence[str]

    async def run(
        self, loop: EventLoop, on_sample: Callable[[bool], None], on_stage: OnStage = lambda words: None
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await loop.sandbox(on_stage) if self.case.tool else None
            on_stage("sampling the first answers")
            engines = [await stack.enter_async_context(SglangEngine(url)) for url in self.urls]
            await sample_all(
                self.problems,
                self.settings,
                engine=SpreadEngine(engines),
                sandbox=sandbox,
                protocol=self.protocol,
                judge=partial(_judge, self.config.reward, self.protocol),
                samples=self.samples,
                on_sample=on_sample,
            )


async def _judge(reward: Reward, protocol: ToolProtocol, trajectory: Trajectory, problem: Problem) -> bool:
    text = decode(protocol.tokenizer, trajectory.ledger.response_ids, control_tokens=False)  # as verl
    return await is_right(reward, trajectory, problem, text)


async def is_right(reward: Reward, trajectory: Trajectory, problem: Problem, text: str) -> bool:
    """Whether the answer is right, as the reward judges: by default, or by ``reward.function``."""
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


def identity_of(config: EvaluationConfig, model: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """Identifies what the samples belong to: these weights, these problems, this judge."""
    weights = sorted(Path(model).glob("*.safetensors"))
    text = json.dumps([[problem.messages, problem.truth] for problem in problems])
    return {
        "model": model,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "problems": hashlib.sha256(text.encode()).hexdigest(),
        **({"reward.function": config.reward.function} if config.reward.function else {}),
        **({"template": template} if (template := template_of(config.model)) else {}),
    }
