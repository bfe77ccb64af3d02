"""The SGLang servers of an evaluation: as many as fit on the node, all with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.shared import CONFIG_FILE
from retool_mcore.data.chat import decode
from retool_mcore.data.prompt_format import difference, format_of_prompts, shown_prompt
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.errors import CheckpointError, ConfigError, RolloutError
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.run import CaseSamples
from retool_mcore.model.files import fetch_config, is_hub_name, read_config
from retool_mcore.platforms.base import engine_environment, get_platform
from retool_mcore.rollout.engine import Engine, EngineTurn, Sampling, TurnRequest
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.protocol import ToolProtocol, checked_prompt, protocol_of
from retool_mcore.rollout.server import SglangServer
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.rollout.tools import ToolContext
from retool_mcore.run.start import STAGES
from retool_mcore.verl.keys.rollout import engine_args

CONNECTING = "connecting to the server"
logger = logging.getLogger(__name__)

# Entries of config.json that do not affect what a server computes.
NOT_ARCHITECTURE = {
    "_name_or_path",
    "_model_name_or_path",  # transformers writes it after reading a GGUF file
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "initializer_range",
    "attention_dropout",
}


@dataclass(frozen=True)
class SpreadEngine:
    """Distributes trajectories over engines. A trajectory stays on one, which caches its turns."""

    engines: Sequence[Engine]

    async def generate(self, request: TurnRequest) -> EngineTurn:
        return await self.engines[crc32(request.trajectory_id.encode()) % len(self.engines)].generate(request)


class Servers:
    """Runs the servers of one model at a time.

    If the next model has the same ``architecture_of``, the servers load its weights. Otherwise they
    are restarted. A device has no room for two models, so the old servers stop first.
    ``url``: URL of a running server, which serves the only model; no server is started then.
    ``models``: all models of the evaluation. Raises ConfigError and CheckpointError.
    """

    def __init__(self, config: EvaluationConfig, out: Path, url: str | None, models: Sequence[str] = ()) -> None:
        if url is not None and len(models) > 1:
            raise ConfigError(f"{url} serves one model, but there are {len(models)} models to evaluate.")
        for model in models if url is None else ():
            config_of(model)  # raises for a missing directory, before anything treats it as a hub name
        self._config, self._out, self._url = config, out, url
        self._platform = get_platform(config.run.platform)
        self._platform.check_dtype(config)
        self._groups: list[list[int]] = [[]] if url is not None else self._platform.server_devices(config)
        self._stack = contextlib.ExitStack()
        self._running: list[SglangServer] = []
        self._model, self._ready = "", False  # the servers' model; they are still loading it until ready

    def __len__(self) -> int:
        return len(self._groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin(self, model: str) -> None:
        """Start the servers with the first model, without waiting for them."""
        if self._url is None and not self._running:
            self._start(model)

    def stage(self, model: str) -> str:
        """A description of what ``urls_of`` will do, for the progress display."""
        if self._url is not None or (self._ready and model == self._model):
            return CONNECTING
        return "loading the model's weights into the engines" if self._ready else STAGES["engines"]

    def urls_of(self, model: str) -> list[str]:
        """URLs of servers with this model's weights. Loads or starts them if necessary."""
        if self._url is not None:
            return [self._url]
        self.begin(model)
        self._wait()
        if model != self._model:
            self._replace(model)
        return [server.url for server in self._running]

    def sampler(self, work: CaseSamples, day: date) -> TokenSampler:
        """A sampler for ``work``. Raises ReToolError for an unsupported protocol or prompt."""
        tokenizer = tokenizer_of(self._config.model, work.case.model, day=day)
        return TokenSampler(protocol_of(self._config.rollout.with_tools(work.case.tool), tokenizer), work)

    def _replace(self, model: str) -> None:
        """Load the model into the running servers, or restart them for another architecture."""
        old, new = architecture_of(self._model), architecture_of(model)
        if different := sorted(name for name in {**old, **new} if old.get(name) != new.get(name)):
            logger.info("%s differs from %s in %s, so the servers restart", model, self._model, different)
            self._stack.close()
            self._start(model)
            self._wait()
        else:
            asyncio.run(_load([server.url for server in self._running], model))
            logger.info("the servers replaced the weights of %s with those of %s", self._model, model)
            self._model = model

    def _start(self, model: str) -> None:
        self._running, self._ready, self._model = [], False, model
        config, args = self._config, engine_args(self._config, self._platform)
        for number, devices in enumerate(self._groups):
            name = f"server_{number}.log" if len(self._groups) > 1 else "server.log"
            server = SglangServer(
                model,
                self._platform,
                dtype=config.model.dtype,
                tp=config.rollout.engine_tp,
                max_running_requests=config.rollout.max_running_requests,
                engine_args={**args, "random_seed": args["random_seed"] + number},
                devices=devices,
                env=engine_environment(config.rollout),
                log_path=self._out / name,
            )
            self._stack.callback(server.stop)
            server.start()
            self._running.append(server)

    def _wait(self) -> None:
        if not self._ready:
            for server in self._running:  # they load their weights concurrently
                server.wait_until_healthy()
            self._ready = True


class TokenSampler:
    """A ``Sampler`` on tokens, through RL's rollout loop.

    Raises DataError for a prompt with more than data.max_prompt_tokens tokens.
    """

    def __init__(self, protocol: ToolProtocol, work: CaseSamples) -> None:
        self._protocol, self._limits = protocol, work.limits
        self.engine = SpreadEngine(())
        limit = work.config.data.max_prompt_tokens
        self._prompts = {
            problem.id: checked_prompt(protocol, problem.messages, limit, f"problem {problem.id}")
            for problem in work.problems
        }

    def notes(self, work: CaseSamples) -> Iterator[str]:
        """Notes for the user: a warning if the prompt format differs, then the first prompt."""
        protocol, case = self._protocol, work.case
        used = format_of_prompts((problem.messages for problem in work.problems), protocol.name if case.tool else "")
        remedy = 'See "Which prompt the model sees" in docs/evaluation.md.'
        yield from difference(case.model, used, case.name, remedy)
        prompt = decode(protocol.tokenizer, self._prompts[work.problems[0].id])
        yield f"the first prompt, as {case.name} sees it:\n{shown_prompt(prompt)}"

    async def connect(self, urls: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        self.engine = SpreadEngine([await stack.enter_async_context(SglangEngine(url)) for url in urls])

    async def trajectory(self, problem: Problem, sampling: Sampling, context: ToolContext) -> Trajectory:
        return await run_trajectory(
            self._prompts[problem.id],
            engine=self.engine,
            sandbox=context.sandbox,
            protocol=self._protocol,
            limits=self._limits,
            sampling=sampling,
            trajectory_id=context.trajectory_id,
            tool_context=context,
        )

    def text(self, trajectory: Trajectory) -> str:
        return decode(self._protocol.tokenizer, trajectory.ledger.response_ids, control_tokens=False)  # as verl


async def _load(urls: Sequence[str], model: str) -> None:
    """Load a model into the servers. Raises RolloutError unless each then reports that model."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(SglangEngine(url)) for url in urls]
        await asyncio.gather(*(engine.load(model) for engine in engines))
        for engine in engines:
            loaded = (await engine.model_info()).get("model_path")
            if loaded != model:
                raise RolloutError(
                    f"{engine.url} should have loaded {model}, but reports {loaded}. Run the same command again: "
                    "the finished samples are kept."
                )


def architecture_of(model: str) -> dict[str, Any]:
    """The part of a model's config.json that must match for a running server to load its weights.

    transformers parses the file and adds defaults, so a published model equals its export from
    another version of transformers. An unknown model_type is compared entry by entry. Raises
    CheckpointError if config.json is unreadable.
    """
    values = config_of(model)
    from transformers import CONFIG_MAPPING

    if values.get("model_type") in CONFIG_MAPPING:
        config_class: Any = CONFIG_MAPPING[values["model_type"]]
        values = config_class.from_dict(values).to_dict()
    return {name: value for name, value in values.items() if name not in NOT_ARCHITECTURE}


def config_of(model: str) -> dict[str, Any]:
    """A model's config.json. Raises CheckpointError if it is unreadable."""
    folder = Path(model)
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{model} is a run, not a model. Evaluate {folder / 'export'}, or export a checkpoint: "
            f"`retool export {model} --to FOLDER`"
        )
    return fetch_config(model) if is_hub_name(model) else read_config(model)
