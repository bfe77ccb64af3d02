"""Several evaluations after another on one local server: another model of the same shape only replaces its weights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retool_mcore.config import RlConfig
from retool_mcore.data.chat import load_tokenizer
from retool_mcore.data.files import replacing
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import SampleFile, Settings, make_report, sample_all
from retool_mcore.evaluate.table import markdown
from retool_mcore.platforms.base import get_platform
from retool_mcore.reward.answer import is_equivalent
from retool_mcore.rollout.protocol import Protocol, protocol_of
from retool_mcore.rollout.server import SglangServer
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox.base import Sandbox, open_sandbox

# What config.json says besides the shape of the weights.
NOT_SHAPE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}

OnStart = Callable[[str, int, int], None]  # case, samples finished before, samples in all
OnSample = Callable[[str, bool], None]  # case, was it right


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model evaluated one way; its files go into a folder of this name."""

    name: str
    model: str
    tool: bool = True


def evaluate_many(
    config: RlConfig,
    cases: Sequence[Case],
    *,
    data: Path,
    out: Path,
    n: int,
    limit: int | None = None,
    url: str | None = None,
    on_start: OnStart = lambda name, finished, total: None,
    on_sample: OnSample = lambda name, correct: None,
) -> dict[str, dict[str, Any]]:
    """Evaluate each case as ``config`` rolls out; write ``out/<case>/report.json``; return the reports by case name.

    Cases should be ordered so that models of one shape follow each other. ``url``: a running server that already holds
    the only model; none is started. Raises ReToolError subclasses; run again to continue.
    """
    models = {case.model for case in cases}
    if url is not None and len(models) > 1:
        raise ConfigError(f"{url} is one server with one model, and there are {len(models)} models to evaluate.")
    for model in models if url is None else ():
        _shape(model)  # a directory that is not there is no name to ask a hub for
    problems = read_problems(data, limit)
    reports: dict[str, dict[str, Any]] = {}
    with _Servers(config, out / "server.log", url) as servers:
        for case in cases:
            settings = Settings.of(config, n, case.tool)
            samples = SampleFile(out / case.name, _identity(case.model, problems) | settings.identity())
            on_start(case.name, len(samples.rows), len(problems) * n)
            if len(samples.rows) < len(problems) * n:
                rollout = config.rollout.model_copy(update={"tool": case.tool})
                protocol = protocol_of(rollout, load_tokenizer(case.model))  # before a server is started in vain
                work = _Work(config, case, problems, settings, samples, protocol, servers.url_of(case.model))
                asyncio.run(work.run(partial(on_sample, case.name)))
            report = {"model": case.model, "data": str(data), **make_report(problems, settings, samples)}
            with replacing(out / case.name / "report.json") as draft:
                Path(draft).write_text(json.dumps(report, indent=1), encoding="utf-8")
            with replacing(out / case.name / "report.md") as draft:
                Path(draft).write_text(markdown(report), encoding="utf-8")
            reports[case.name] = report
    return reports


@dataclass(frozen=True)
class _Work:
    config: RlConfig
    case: Case
    problems: Sequence[Problem]
    settings: Settings
    samples: SampleFile
    protocol: Protocol
    url: str

    async def run(self, on_sample: Callable[[bool], None]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            sandbox: Sandbox | None = None
            if self.case.tool:
                spec = self.config.sandbox
                opened = open_sandbox(spec.where, min_level=spec.min_level, workers=spec.workers)
                sandbox = await stack.enter_async_context(opened)
            engine = await stack.enter_async_context(SglangEngine(self.url))
            timeout_s = self.config.reward.timeout_s

            async def judge(answer: str | None, truth: str) -> bool:
                return answer is not None and await asyncio.to_thread(is_equivalent, answer, truth, timeout_s=timeout_s)

            await sample_all(
                self.problems,
                self.settings,
                engine=engine,
                sandbox=sandbox,
                protocol=self.protocol,
                judge=judge,
                samples=self.samples,
                on_sample=on_sample,
            )


class _Servers:
    """At most one server of ours at a time: kept while only weights change, replaced when their shape does."""

    def __init__(self, config: RlConfig, log_path: Path, url: str | None) -> None:
        self.url = url
        self._start = partial(
            SglangServer,
            platform=get_platform(config.run.platform),
            dtype=config.model.dtype,
            tp=config.rollout.engine_tp,
            max_running_requests=config.rollout.max_running_requests,
            log_path=log_path,
        )
        self._stack = contextlib.ExitStack()
        self._server: SglangServer | None = None
        self._shape: dict[str, Any] = {}
        self._model = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def url_of(self, model: str) -> str:
        """A server that holds this model's weights."""
        if self.url is not None:
            return self.url
        shape = _shape(model)
        if self._server is None or shape != self._shape:
            self._stack.close()
            self._server = self._stack.enter_context(self._start(model))
        elif model != self._model:
            asyncio.run(_load(self._server.url, model))
        self._shape, self._model = shape, model
        return self._server.url


async def _load(url: str, model: str) -> None:
    async with SglangEngine(url) as engine:
        await engine.load(model)


def _shape(model: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model} is no model directory: {path} cannot be read: {error}") from error
    return {name: value for name, value in shape.items() if name not in NOT_SHAPE}


def _identity(model: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """What the samples belong to: these weights and these problems."""
    weights = sorted(Path(model).glob("*.safetensors"))
    text = json.dumps([[problem.messages, problem.truth] for problem in problems])
    return {
        "model": model,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "problems": hashlib.sha256(text.encode()).hexdigest(),
    }
