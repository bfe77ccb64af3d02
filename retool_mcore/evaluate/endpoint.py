"""Evaluates a model behind an OpenAI-compatible server: text in, text out, no tokens.

The tool loop is the one of training in its rules (turns, malformed calls, interpreter time), told
in text: nobody here has the model's tokenizer. Protocol "retool" writes one growing text, which
needs /v1/completions; every other protocol takes the server's own tool calls from
/v1/chat/completions. The server's own count of sampled tokens, where it reports one, is held
against rollout.max_response_tokens.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import httpx

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.layouts import Columns
from retool_mcore.data.prompt_format import shown_prompt
from retool_mcore.data.prompts import retool_messages
from retool_mcore.data.templates import read_template, with_args
from retool_mcore.data.tool import CODE_END, CODE_INTERPRETER, CODE_START
from retool_mcore.errors import ConfigError, RolloutError
from retool_mcore.evaluate.cases import (
    Case,
    EventLoop,
    OnNote,
    OnSample,
    OnStage,
    OnStart,
    hold_folder,
    identity_of,
    is_right,
    write_report,
)
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import SampleFile, Settings, make_report, sample_each, seeded
from retool_mcore.evaluate.servers import ASKING
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.calls import Calls
from retool_mcore.rollout.engine import EngineUnavailable, Sampling
from retool_mcore.rollout.ledger import Ledger, StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, Turn, to_its_end
from retool_mcore.rollout.protocol import RETOOL_MARKUP, protocol_class, tools_of
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.rollout.tool_call import Call, Malformed, Parsed, call_of, parse_hermes, parse_retool, without_call
from retool_mcore.rollout.tools import Given, Tool
from retool_mcore.run.trackers import check_trackers
from retool_mcore.sandbox.base import Sandbox

CONNECT_S = 10.0
CHARS_PER_TOKEN = 4  # of interpreter output: its budget in tokens becomes one in characters
KEY = "OPENAI_API_KEY"
NEWER_LENGTH = "max_completion_tokens"
CONTROL = re.compile(r"<(?=\|[^|<>\s]{1,40}\|>)")  # of tokens such as <|im_end|>, whatever the model's are
_TOO_LONG = re.compile(r"context|maximum.{0,40}(?:length|tokens)|too long", re.IGNORECASE | re.DOTALL)


class Endpoint(SglangEngine):
    """One OpenAI-compatible server: https://HOST/v1. Retries as for our own servers."""

    def __init__(self, url: str, model: str, *, timeout_s: float = 1800.0, retry_s: float = 120.0) -> None:
        base = url.rstrip("/")
        super().__init__(base if base.endswith("/v1") else f"{base}/v1", timeout_s=timeout_s, retry_s=retry_s)
        self.model = model
        self.length_name = "max_tokens"
        if key := os.environ.get(KEY):
            self._client.headers["Authorization"] = f"Bearer {key}"

    async def check(self) -> None:
        """Raise ConfigError where nobody answers, before a request of ours waits for it."""
        try:
            await self._client.get("/models", timeout=CONNECT_S)
        except httpx.TransportError as error:
            raise ConfigError(
                f"--endpoint {self.url}: no server answers there ({error or type(error).__name__}). "
                "Start it, or name another URL."
            ) from error

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The first choice, and how many tokens the server says it has; 0 where it does not.

        ``max_tokens`` of the body goes under the name that the server takes.
        """
        answer = await self._post_with_length(path, dict(body))
        choices = answer.get("choices")
        if not is_tables(choices) or not choices:
            raise RolloutError(f"{self.url}{path} answers no choices: {json.dumps(answer)[:300]}")
        usage = answer.get("usage")
        return choices[0], int(usage.get("completion_tokens") or 0) if is_table(usage) else 0

    async def _post_with_length(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        most, name = body.pop("max_tokens"), self.length_name
        try:
            return await self.post(path, {"model": self.model, **body, name: most})
        except RolloutError as error:
            if name == NEWER_LENGTH or NEWER_LENGTH not in str(error):
                raise
        self.length_name = NEWER_LENGTH  # OpenAI's models that reason refuse max_tokens
        return await self.post(path, {"model": self.model, **body, NEWER_LENGTH: most})


class Form(Protocol):
    """How a conversation is written on the wire."""

    path: str

    def body(self) -> dict[str, Any]:
        """What is asked, without the sampling."""
        ...

    def said(self, choice: Mapping[str, Any]) -> tuple[str, Parsed]:
        """The model's turn, as text and as read."""
        ...

    def told(self, results: Sequence[str]) -> None:
        """Write the results of the turn's calls."""
        ...


class Chat:
    """Messages, with the server's own tool calls; without ``tools`` text alone."""

    path = "/chat/completions"

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None) -> None:
        self._messages, self._tools = [dict(message) for message in messages], tools
        self._ids: list[str] = []

    def body(self) -> dict[str, Any]:
        if self._tools is None:
            return {"messages": self._messages}
        return {"messages": self._messages, "tools": [CODE_INTERPRETER, *(tool.schema for tool in self._tools)]}

    def said(self, choice: Mapping[str, Any]) -> tuple[str, Parsed]:
        message = choice["message"]
        content: str = message.get("content") or ""
        thoughts = {name: message[name] for name in ("reasoning_content", "reasoning") if message.get(name)}
        thought = next(iter(thoughts.values()), "")  # an answer in it counts, as in RL
        text = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
        if self._tools is None:
            return text, without_call(text)
        made: list[dict[str, Any]] = message.get("tool_calls") or []
        if not made:  # of a server that does not read calls itself
            self._messages.append({"role": "assistant", "content": content, **thoughts})
            parsed = parse_hermes(text, self._tools)
            self._ids = [f"call_{number}" for number in range(max(1, len(parsed.calls)))]
            return text, parsed
        self._messages.append({"role": "assistant", "content": content, "tool_calls": made, **thoughts})
        self._ids = [str(call.get("id") or f"call_{number}") for number, call in enumerate(made)]
        repairs: list[str] = []
        try:
            calls = [self._call(each["function"], repairs) for each in made]
        except Malformed as error:
            return text, error.parsed(self._tools or ())
        return text, Parsed(kind="tool_call", calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))

    def _call(self, function: Mapping[str, Any], repairs: list[str]) -> Call:
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # else `call_of` says what is wrong
            arguments = json.loads(cast(str, arguments), strict=False)
        return call_of(function.get("name"), arguments, repairs, self._tools or ())

    def told(self, results: Sequence[str]) -> None:
        results = [*results, *([results[0]] * (len(self._ids) - len(results)))]  # a malformed turn has one text
        for each, result in zip(self._ids, results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": each, "content": CONTROL.sub("< ", result)})


class Inline:
    """The paper's form: one text, which the model goes on after each result."""

    path = "/completions"

    def __init__(self, prompt: str) -> None:
        self._text = prompt

    def body(self) -> dict[str, Any]:
        return {"prompt": self._text, "stop": [CODE_END]}

    def said(self, choice: Mapping[str, Any]) -> tuple[str, Parsed]:
        text: str = choice.get("text") or ""
        # The wire leaves the stop text out. vLLM and SGLang name it; of others an open block tells.
        named = choice.get("stop_reason") or choice.get("matched_stop")
        opened = text.count(CODE_START) > text.count(CODE_END)
        if choice.get("finish_reason") == "stop" and (named == CODE_END or (named is None and opened)):
            text += CODE_END
        self._text += text
        return text, parse_retool(text)

    def told(self, results: Sequence[str]) -> None:
        shown = RETOOL_MARKUP.sub(lambda match: f"{match[0][0]} {match[0][1:]}", CONTROL.sub("< ", results[0]))
        self._text += f"\n<interpreter>\n{shown}\n</interpreter>\n"


@dataclass(frozen=True)
class Shown:
    """What ``Calls`` asks of a protocol, in characters."""

    name: str
    tools: Sequence[Tool] = ()

    def shown(self, output: str, max_tokens: int) -> tuple[str, int]:
        """``output`` with its middle cut. No tokens are counted, so none are cut."""
        kept = CHARS_PER_TOKEN * max_tokens
        if len(output) <= kept:
            return output, 0
        cut = len(output) - kept
        return f"{output[: kept // 2]}\n[... {cut} characters cut here ...]\n{output[-(kept - kept // 2) :]}", 0


async def converse(
    form: Form,
    *,
    endpoint: Endpoint,
    sandbox: Sandbox | None,
    shown: Shown,
    limits: Limits,
    sampling: Sampling,
    trajectory_id: str,
    given: Given,
) -> Trajectory:
    """One trajectory, whose ledger has no tokens. Outages drop it, as in ``run_trajectory``."""
    trajectory = Trajectory(ledger=Ledger([0], 1), started_unix_s=time.time())
    calls = Calls(shown, limits, replace(given, trajectory_id=trajectory_id, sandbox=sandbox))
    turns = _turns(trajectory, form, endpoint, calls, limits=limits, sampling=sampling)
    return await to_its_end(trajectory, calls, turns)


async def _turns(
    trajectory: Trajectory, form: Form, endpoint: Endpoint, calls: Calls, *, limits: Limits, sampling: Sampling
) -> StopReason:
    left, malformed = limits.max_response_tokens, 0
    params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    while True:
        started = time.perf_counter()
        try:
            choice, tokens = await endpoint.ask(form.path, {**form.body(), **params, "max_tokens": left})
        except EngineUnavailable:
            raise
        except RolloutError as error:
            if trajectory.turns and _TOO_LONG.search(str(error)):
                return StopReason.LENGTH  # the results have filled the model's context
            raise
        text, parsed = form.said(choice)
        turn = Turn(start=0, tokens=0, text=text, parsed=parsed, answer=parsed.answer)
        turn.engine_s = time.perf_counter() - started
        trajectory.turns.append(turn)
        left -= tokens
        if choice.get("finish_reason") == "length" or left <= 0:
            turn.parsed, turn.answer = None, last_answer(text)
            return StopReason.LENGTH
        if parsed.kind in ("answer", "text"):
            return StopReason.FINISHED
        malformed = malformed + 1 if parsed.kind == "malformed" else 0
        if malformed >= limits.max_malformed_calls:
            return StopReason.MALFORMED
        if len(trajectory.turns) >= limits.max_turns:
            return StopReason.TURNS
        form.told(await _results(turn, parsed, calls))
        if sum(result.run_s for each in trajectory.turns for result in each.results) >= limits.max_tool_s:
            return StopReason.TOOL_TIME


async def _results(turn: Turn, parsed: Parsed, calls: Calls) -> list[str]:
    if parsed.kind == "malformed":
        return [f"Error: {parsed.error}"]
    started = time.perf_counter()
    turn.results.extend(await calls.run(parsed.calls))
    turn.tool_s = time.perf_counter() - started
    return [result.shown for result in turn.results]


def prompt_text(config: EvaluationConfig, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt of protocol "retool": by model.chat_template, or "chatml" where it is not set."""
    from transformers.utils import chat_template_utils

    template = with_args(read_template(config.model.chat_template or "chatml"), config.model.template_args)
    render: Callable[..., Any] = chat_template_utils.render_jinja_template  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    rendered, _ = render(
        conversations=[[dict(message) for message in retool_messages(messages)]],
        chat_template=template,
        add_generation_prompt=True,
    )
    return rendered[0]


def evaluate_endpoint(
    config: EvaluationConfig,
    cases: Sequence[Case],
    *,
    url: str,
    data: Sequence[Path] = (),
    columns: Columns | None = None,
    out: Path,
    n: int | None = None,
    concurrency: int | None = None,
    limit: int | None = None,
    on_start: OnStart = lambda name, finished, total: None,
    on_stage: OnStage = lambda words: None,
    on_sample: OnSample = lambda name, correct: None,
    on_note: OnNote = lambda words: None,
) -> dict[str, dict[str, Any]]:
    """Like ``evaluate_many``, of models that one OpenAI-compatible server names."""
    check_trackers(config)
    protocol_class(config.rollout.protocol)
    n = n or config.validation.n
    data = data or [Path(path) for path in config.validation.files]
    problems = read_problems(data, limit, columns)
    reports: dict[str, dict[str, Any]] = {}
    with hold_folder(out), EventLoop(config) as loop:
        for case in cases:
            settings = Settings.of(config, n, case.tool, concurrency=concurrency)
            identity = {"endpoint": url, **identity_of(config, case.model, problems), **settings.identity()}
            samples = SampleFile(out / case.name, identity)
            left = len(problems) * n - len(samples.rows)
            if left:
                on_stage(ASKING)
                loop.run(_check(url, case.model))
                turns = "\n".join(f"{turn['role']}: {turn['content']}" for turn in problems[0].messages)
                on_note(f"the first prompt, as {case.name} is sent it:\n{shown_prompt(turns)}")
            on_start(case.name, len(samples.rows), len(problems) * n)
            if left:
                work = _Asked(config, case, url, problems, settings, samples)
                loop.run(work.run(loop, partial(on_sample, case.name)))
            report = make_report(problems, settings, samples)
            reports[case.name] = write_report(config, out, case, data, report)
    return reports


async def _check(url: str, model: str) -> None:
    async with Endpoint(url, model) as endpoint:
        await endpoint.check()


@dataclass(frozen=True)
class _Asked:
    config: EvaluationConfig
    case: Case
    url: str
    problems: Sequence[Problem]
    settings: Settings
    samples: SampleFile

    async def run(self, loop: EventLoop, on_sample: Callable[[bool], None]) -> None:
        config, case, settings = self.config, self.case, self.settings
        inline = case.tool and settings.protocol == "retool"
        tools = tools_of(config.rollout) if case.tool else ()
        if inline and tools:
            raise ConfigError(f'rollout.protocol = "retool" has no names of tools, and {tools[0].name} is offered.')
        sandbox = await loop.sandbox() if case.tool else None
        async with Endpoint(self.url, case.model) as endpoint:

            async def one(problem: Problem, sample: int) -> Trajectory:
                form = (
                    Inline(prompt_text(config, problem.messages))
                    if inline
                    else Chat(problem.messages, tools if case.tool else None)
                )
                return await converse(
                    form,
                    endpoint=endpoint,
                    sandbox=sandbox,
                    shown=Shown(settings.protocol, tools),
                    limits=settings.limits,
                    sampling=seeded(settings, problem, sample),
                    trajectory_id=f"{problem.id}-{sample}",
                    given=Given(truth=problem.truth),
                )

            judge = partial(_judge, config)
            await sample_each(self.problems, settings, one, judge=judge, samples=self.samples, on_sample=on_sample)


async def _judge(config: EvaluationConfig, trajectory: Trajectory, problem: Problem) -> bool:
    said = [part for turn in trajectory.turns for part in (turn.text, *(result.shown for result in turn.results))]
    return await is_right(config.reward, trajectory, problem, "\n".join(said))
