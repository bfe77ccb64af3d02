"""Evaluates a model behind an OpenAI-compatible server (/v1/chat/completions).

It uses the training loop (``rollout.loop.converse``) with the same budgets, stop reasons and calls.
``Chat`` implements the model's side on text, because the model's tokenizer is not available. The
server parses the tool calls. rollout.max_response_tokens limits the completion tokens that the
server reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import httpx

from retool_mcore.config import EvaluationConfig
from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.prompt_format import shown_prompt
from retool_mcore.data.tool import CODE_INTERPRETER, TOOL_NAME
from retool_mcore.errors import ConfigError, RolloutError
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.run import CaseSamples
from retool_mcore.evaluate.servers import CONNECTING
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.calls import Calls
from retool_mcore.rollout.engine import EngineUnavailable, Sampling
from retool_mcore.rollout.ledger import Ledger
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import OutOfRoom, Trajectory, Turn, converse
from retool_mcore.rollout.protocol import protocol_class, tools_of
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.rollout.tool_call import (
    Call,
    Parsed,
    call_of,
    parse_hermes,
    parse_text_turn,
    with_calls,
    without_interpreter,
)
from retool_mcore.rollout.tools import Tool, ToolContext

CONNECT_S = 10.0
CHARS_PER_TOKEN = 4  # converts the token budget of a tool output to characters
KEY = "OPENAI_API_KEY"
NEWER_LENGTH = "max_completion_tokens"
CONTROL = re.compile(r"<(?=\|[^|<>\s]{1,40}\|>)")  # the start of control tokens such as <|im_end|>, for any model
_TOO_LONG = re.compile(r"context|maximum.{0,40}(?:length|tokens)|too long", re.IGNORECASE | re.DOTALL)


class Endpoint(SglangEngine):
    """Client of an OpenAI-compatible server (https://HOST/v1). Retries like ``SglangEngine``."""

    def __init__(self, url: str, model: str, *, timeout_s: float = 1800.0, retry_s: float = 120.0) -> None:
        super().__init__(base_url(url), timeout_s=timeout_s, retry_s=retry_s)
        self.model = model
        self.length_name = "max_tokens"
        if key := os.environ.get(KEY):
            self._client.headers["Authorization"] = f"Bearer {key}"

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The first choice of the response and its number of completion tokens (0 if not reported).

        Sends the body's ``max_tokens`` under the name that the server supports.
        """
        answer = await self._post_with_length(path, dict(body))
        choices = answer.get("choices")
        if not is_tables(choices) or not choices:
            raise RolloutError(f"{self.url}{path} returned no choices: {json.dumps(answer)[:300]}")
        usage = answer.get("usage")
        return choices[0], int(usage.get("completion_tokens") or 0) if is_table(usage) else 0

    async def _post_with_length(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        limit, name = body.pop("max_tokens"), self.length_name
        try:
            return await self.post(path, {"model": self.model, **body, name: limit})
        except RolloutError as error:
            if name == NEWER_LENGTH or NEWER_LENGTH not in str(error):
                raise
        self.length_name = NEWER_LENGTH  # OpenAI's reasoning models reject max_tokens
        return await self.post(path, {"model": self.model, **body, NEWER_LENGTH: limit})


@dataclass(frozen=True)
class TextTools:
    """Text counterpart of a ``ToolProtocol`` for ``Calls``: the tools, and how to render results.

    Cuts results by characters, and breaks up control tokens in them.
    """

    tools: Sequence[Tool]
    interpreter: bool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [*([CODE_INTERPRETER] if self.interpreter else ()), *(tool.schema for tool in self.tools)]

    def read(self, parsed: Parsed) -> Parsed:
        return parsed if self.interpreter else without_interpreter(parsed, self.tools)

    def render_output(self, output: str, max_tokens: int) -> tuple[str, int]:
        """``output`` with its middle cut by characters. The count of cut tokens is always 0."""
        shown = CONTROL.sub("< ", output)
        kept = CHARS_PER_TOKEN * max_tokens
        if len(shown) <= kept:
            return shown, 0
        cut = len(shown) - kept
        return f"{shown[: kept // 2]}\n[... {cut} characters cut here ...]\n{shown[-(kept - kept // 2) :]}", 0


class Chat:
    """A ``rollout.loop.Conversation`` on chat messages, with the server's tool calls.

    ``tools``: None for text-only. The ledger stays empty; a turn's ``tokens`` is the number that
    the server reports.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: TextTools | None,
        endpoint: Endpoint,
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self._messages, self._tools = [dict(message) for message in messages], tools
        self._endpoint, self._max_tokens = endpoint, limits.max_response_tokens
        self._sampling = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        self.trajectory = Trajectory(ledger=Ledger((), limits.max_response_tokens))
        self._ids: list[str] = []

    async def next_turn(self) -> Turn:
        before = self.trajectory.turns
        used = sum(turn.tokens for turn in before)
        self.trajectory.requests += 1
        try:
            body = {"messages": self._messages, **({"tools": self._tools.schemas} if self._tools else {})}
            body |= {**self._sampling, "max_tokens": self._max_tokens - used}
            choice, tokens = await self._endpoint.ask("/chat/completions", body)
        except EngineUnavailable:
            raise
        except RolloutError as error:
            if before and _TOO_LONG.search(str(error)):  # tool results have filled the model's context
                raise OutOfRoom from error
            raise
        text, parsed = self.read(choice)
        if choice.get("finish_reason") == "length" or used + tokens >= self._max_tokens:
            return Turn(start=used, tokens=tokens, text=text, parsed=None, answer=last_answer(text))
        return Turn(start=used, tokens=tokens, text=text, parsed=parsed, answer=parsed.answer)

    def read(self, choice: Mapping[str, Any]) -> tuple[str, Parsed]:
        """Append the model's turn to the messages; return its text and the parsed turn."""
        message = choice["message"]
        content: str = message.get("content") or ""
        thoughts = {name: message[name] for name in ("reasoning_content", "reasoning") if message.get(name)}
        thought = next(iter(thoughts.values()), "")  # an answer in the reasoning counts, as in RL
        text = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
        if self._tools is None:
            return text, parse_text_turn(text)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        turn = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **thoughts}
        self._messages.append(turn)
        offered = self._tools.tools
        # A server that does not parse calls leaves them in the text.
        parsed = self._tools.read(
            with_calls(partial(_calls, calls, offered), offered) if calls else parse_hermes(text, offered)
        )
        with_ids = calls or [{}] * max(1, len(parsed.calls))
        self._ids = [str(call.get("id") or f"call_{number}") for number, call in enumerate(with_ids)]
        return text, parsed

    def write(self, results: Sequence[str]) -> None:
        """See ``rollout.loop.Conversation``."""
        results = [*results, *([results[0]] * (len(self._ids) - len(results)))]  # one error text if malformed
        for call_id, result in zip(self._ids, results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})


def _calls(parsed: Sequence[Mapping[str, Any]], tools: Sequence[Tool], repairs: list[str]) -> list[Call]:
    """The calls that the server parsed. Decoding their JSON arguments is not a repair."""
    functions = [call["function"] for call in parsed]
    calls = [call_of(function.get("name"), function.get("arguments"), repairs, tools) for function in functions]
    repairs[:] = [kind for kind in repairs if kind != "encoded_arguments"]
    return calls


class Api:
    """The models of one OpenAI-compatible server; counterpart of ``Servers``."""

    def __init__(self, config: EvaluationConfig, url: str) -> None:
        self._config, self._url = config, url
        self._reachable = False

    def __len__(self) -> int:
        return 1

    def begin(self, model: str) -> None:
        """Raise ConfigError if the server is unreachable, instead of retrying requests."""
        if self._reachable:
            return
        try:
            httpx.get(f"{base_url(self._url)}/models", timeout=CONNECT_S, trust_env=False)
        except httpx.TransportError as error:
            raise ConfigError(
                f"--endpoint {self._url}: no server responds ({error or type(error).__name__}). "
                "Start it, or name another URL."
            ) from error
        self._reachable = True

    def stage(self, model: str) -> str:
        return CONNECTING

    def urls_of(self, model: str) -> list[str]:
        return [self._url]

    def sampler(self, work: CaseSamples, day: date) -> TextSampler:
        return TextSampler(self._config, work)


def base_url(url: str) -> str:
    """The URL of an OpenAI-compatible server with its /v1."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


class TextSampler:
    """A ``Sampler`` on text, through the training loop."""

    _endpoint: Endpoint

    def __init__(self, config: EvaluationConfig, work: CaseSamples) -> None:
        self._case, self._limits = work.case, work.limits
        rollout = config.rollout.with_tools(self._case.tool)
        protocol_class(rollout.protocol)
        if self._case.tool and rollout.protocol == "retool":
            raise ConfigError(
                'rollout.protocol = "retool" writes results into the model\'s text, which a chat API does not support. '
                "Serve the model with SGLang, and name that server in --url instead of --endpoint."
            )
        tools = tools_of(rollout) if self._case.tool else ()
        self._tools = TextTools(tools, interpreter=TOOL_NAME in rollout.tools)

    def notes(self, work: CaseSamples) -> Iterator[str]:
        turns = "\n".join(f"{turn['role']}: {turn['content']}" for turn in work.problems[0].messages)
        yield f"the first prompt, as sent to {work.case.name}:\n{shown_prompt(turns)}"

    async def connect(self, urls: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        self._endpoint = await stack.enter_async_context(Endpoint(urls[0], self._case.model))

    async def trajectory(self, problem: Problem, sampling: Sampling, context: ToolContext) -> Trajectory:
        tools = self._tools if self._case.tool else None
        model = Chat(problem.messages, tools, self._endpoint, sampling, self._limits)
        calls = Calls(self._tools.tools, self._tools.render_output, self._limits, context)
        return await converse(model.trajectory, model, calls, self._limits)

    def text(self, trajectory: Trajectory) -> str:
        parts = [text for turn in trajectory.turns for text in (turn.text, *(result.shown for result in turn.results))]
        return "\n".join(parts)
