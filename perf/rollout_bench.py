"""Measures the rollout loop, with or without an SGLang server. Prints one JSON object per case.

    python perf/rollout_bench.py overshoot --protocol hermes
    python perf/rollout_bench.py drift --turns 10000
    python perf/rollout_bench.py overhead

- overshoot: tokens sampled after the end of a call; expected: 0. Also the requests per turn: 1 if
  the engine stops at the end of a call.
- drift: turns in which the server saw other token ids than the loop sent; expected: 0.
- overhead: CPU ms per turn outside of engine and sandbox.

The model has the quickstart's architecture and random weights. Run it on a quiet machine: the
record includes the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from bench import git
from transformers import PreTrainedTokenizerBase

from retool_mcore.config import SandboxSettings, ToolLoop
from retool_mcore.data.task_model import VOCAB_MULTIPLE, build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.engine import EngineTurn, Sampling, TurnRequest
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.protocol import Hermes, ToolProtocol, open_protocol
from retool_mcore.rollout.server import SglangServer
from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.rollout.tool_call import CALL_END, CODE_END, Parsed, code_calls
from retool_mcore.sandbox.base import ExecResult

app = typer.Typer(pretty_exceptions_enable=False)
CONTEXT_TOKENS = 4096  # context of the server's model, longer than the quickstart's
QUESTION = [{"role": "user", "content": "What is the sum of the integers from 412 to 967, inclusive?"}]
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(sum(range(412, 968)))"}}\n</tool_call>'


def limits_for(*, max_response_tokens: int, **budgets: Any) -> Limits:
    """A run's default limits without a time limit for tools. ``budgets`` replace other limits."""
    defaults = Limits.of(ToolLoop(max_response_tokens=max_response_tokens), SandboxSettings())
    return replace(defaults, max_tool_s=math.inf, **budgets)


class InstantSandbox:
    """A sandbox that answers at once and executes nothing."""

    def __init__(self, output: str = "383362") -> None:
        self.output = output

    async def execute(self, code: str, **limits: Any) -> ExecResult:
        await asyncio.sleep(0)
        return ExecResult(status="finished", return_code=0, stdout=self.output, stderr="")


class EveryTurnCalls(Hermes):
    """Treats each turn's text as a call, whatever it is, so the limit sets the number of turns."""

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return Parsed(kind="tool_call", calls=code_calls("pass"))


class BenchEngine(SglangEngine):
    """SGLang with more sampling options, and turns of exactly ``turn_tokens`` if it is not 0."""

    engine_stops = True  # the engine stops at the end of a call

    def __init__(self, url: str, *, turn_tokens: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(url)
        self.turn_tokens = turn_tokens
        self.options = (options or {}) | ({"ignore_eos": True, "stop_token_ids": []} if turn_tokens else {})

    def body(self, request: TurnRequest) -> dict[str, Any]:
        body = super().body(request if self.engine_stops else replace(request, call_end=None))
        body["sampling_params"] |= self.options
        if self.turn_tokens:
            body["sampling_params"]["max_new_tokens"] = self.turn_tokens
            # Forbid stop tokens within a turn, because the loop raises an error for them.
            never = {str(token_id): -1e4 for token_id in request.stop_token_ids}
            body["sampling_params"]["logit_bias"] = never
        return body

    async def generate(self, request: TurnRequest) -> EngineTurn:
        turn = await super().generate(request)
        stop = "stop" if self.turn_tokens else turn.stop
        return EngineTurn(
            token_ids=turn.token_ids, logprobs=turn.logprobs, stop=stop, context_tokens=turn.context_tokens
        )


class EchoEngine(BenchEngine):
    """Counts contexts whose token ids on the server differ from those sent.

    ``other_if_retokenized``: contexts whose ids would differ if their text were encoded again.
    """

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase, *, turn_tokens: int) -> None:
        super().__init__(url, turn_tokens=turn_tokens)
        self.tokenizer = tokenizer
        self.turns = self.other_ids = self.other_if_retokenized = 0

    def body(self, request: TurnRequest) -> dict[str, Any]:
        body = super().body(request)
        # SGLang reports the vocabulary's last id as 0 (scheduler_output_processor_mixin.py clips
        # it). Here it is a padding id, which only a random model samples.
        padding = range(len(self.tokenizer), -(-len(self.tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
        body["sampling_params"]["logit_bias"] |= {str(token_id): -1e4 for token_id in padding}
        return body | {"logprob_start_len": 0}

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        answer = await super().post(path, body)
        sent = body["input_ids"]
        saw = [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]]
        self.turns += 1
        self.other_ids += saw != sent
        again = self.tokenizer.encode(self.tokenizer.decode(sent), add_special_tokens=False)
        self.other_if_retokenized += again != sent
        return answer


@dataclass
class InstantEngine:
    """An engine that answers at once with a call in each turn."""

    call_ids: list[int]

    async def generate(self, request: TurnRequest) -> EngineTurn:
        await asyncio.sleep(0)
        return EngineTurn(token_ids=self.call_ids, logprobs=[-0.5] * len(self.call_ids), stop="stop")


async def run_trajectories(
    engine: Any,
    protocol: ToolProtocol,
    limits: Limits,
    *,
    tool: InstantSandbox,
    count: int,
    in_flight: int,
    seeded: bool = True,
) -> list[Trajectory]:
    """Run ``count`` trajectories, ``in_flight`` at a time."""
    slots = asyncio.Semaphore(in_flight)
    prompt = protocol.prompt_ids(QUESTION)

    async def one(index: int) -> Trajectory:
        async with slots:
            return await run_trajectory(
                prompt,
                engine=engine,
                sandbox=tool,  # type: ignore[arg-type]  # the loop uses only a sandbox's execute
                protocol=protocol,
                limits=limits,
                sampling=Sampling(seed=index if seeded else None),
                trajectory_id=str(index),
            )

    done = await asyncio.gather(*(one(index) for index in range(count)))
    dropped = [each.drop_error for each in done if each.dropped]
    assert not dropped, f"{len(dropped)} trajectories dropped, the first: {dropped[0]}"
    return list(done)


@contextlib.asynccontextmanager
async def serve(slots: int, *more_args: str) -> AsyncIterator[tuple[str, PreTrainedTokenizerBase]]:
    """Start a server with a random model, as verl starts it; yields its URL and the tokenizer."""
    tokenizer = build_tokenizer(tokenizer_rows())
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", tokenizer, seed=0)
        settings = Path(folder) / "model" / "config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}))
        with SglangServer(
            Path(folder) / "model",
            get_platform("cpu"),
            dtype="float32",
            log_path=Path(folder) / "server.log",
            max_running_requests=slots,
            extra_args=["--skip-tokenizer-init", *more_args],
        ) as server:
            yield server.url, tokenizer


@app.command()
def overshoot(
    protocol: Annotated[
        Literal["hermes", "retool"], typer.Option(help="end tag of one token (hermes) or several (retool)")
    ],
    trajectories: Annotated[int, typer.Option(min=1)] = 256,
    engine_stops: Annotated[bool, typer.Option(help="the engine, not the loop, stops at the end of a call")] = True,
) -> None:
    """Count tokens after the end of a call, with a random model biased towards the end tag."""

    async def measure() -> dict[str, Any]:
        async with serve(slots=64) as (url, tokenizer):
            rules = open_protocol(protocol, tokenizer)
            tag = CALL_END if protocol == "hermes" else CODE_END
            ids = set(tokenizer.encode(tag, add_special_tokens=False))
            bias = {str(token_id): 4.0 if protocol == "hermes" else 7.0 for token_id in ids}
            limits = limits_for(max_response_tokens=400, max_turns=1000, max_malformed_calls=1000)
            async with BenchEngine(url, options={"logit_bias": bias}) as engine:
                engine.engine_stops, started = engine_stops, time.perf_counter()
                done = await run_trajectories(
                    engine, rules, limits, tool=InstantSandbox(), count=trajectories, in_flight=64
                )
                wall_s = time.perf_counter() - started
        turns = [
            each.ledger.response_ids[turn.start : turn.start + turn.tokens] for each in done for turn in each.turns
        ]
        past = [_tokens_past(tokenizer, turn, tag) for turn in turns]
        called = [tokens for tokens in past if tokens is not None]
        requests = sum(each.requests for each in done)
        return {
            "turns": len(turns),
            "requests": requests,
            "requests_per_turn": round(requests / len(turns), 3),
            "tokens_per_s": round(sum(map(len, turns)) / wall_s, 1),
            "turns_that_complete_the_tag": len(called),
            "tokens": sum(map(len, turns)),
            "overshoot_tokens": sum(called),
        }

    _report("overshoot", {"protocol": protocol, "trajectories": trajectories, "engine_stops": engine_stops}, measure())


def _tokens_past(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], tag: str) -> int | None:
    """The number of tokens after the one that completes ``tag``; None if the turn has no tag."""
    text = ""
    for position, token_id in enumerate(turn):
        text = (
            str(tokenizer.decode(list(turn[: position + 1]))) if tag[-1] in str(tokenizer.decode([token_id])) else text
        )
        if tag in text:
            return len(turn) - position - 1
    return None


@app.command()
def drift(
    turns: Annotated[int, typer.Option(min=1, help="total number of model turns")] = 10_000,
    turn_tokens: Annotated[int, typer.Option(min=1)] = 8,
) -> None:
    """Count turns whose context on the server has other token ids than in the ledger."""
    per_trajectory = 10

    async def measure() -> dict[str, Any]:
        async with serve(slots=64) as (url, tokenizer):
            protocol = EveryTurnCalls(tokenizer)
            limits = limits_for(max_response_tokens=800, max_turns=per_trajectory)
            count = -(-turns // per_trajectory)
            async with EchoEngine(url, tokenizer, turn_tokens=turn_tokens) as engine:
                done = await run_trajectories(
                    engine, protocol, limits, tool=InstantSandbox(), count=count, in_flight=64
                )
        for each in done:  # the ledger checks the contexts' lengths, EchoEngine their ids
            assert len(each.turns) == per_trajectory, f"a trajectory ended with {each.stop_reason}"
        return {
            "turns": engine.turns,
            "turns_with_other_ids": engine.other_ids,
            "turns_with_other_ids_if_text_were_encoded_again": engine.other_if_retokenized,
        }

    _report("drift", {"turns": turns, "turn_tokens": turn_tokens}, measure())


@app.command()
def overhead(
    in_flight: Annotated[int, typer.Option(min=1)] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    turns: Annotated[int, typer.Option(min=1, help="turns per trajectory")] = 8,
) -> None:
    """Measure CPU time per turn while engine and sandbox answer at once.

    This is the cost of the loop and of asyncio.
    """

    async def measure() -> dict[str, Any]:
        tokenizer = build_tokenizer(tokenizer_rows())
        thinking = "We add the numbers one after the other. " * 40
        call_ids = tokenizer.encode(thinking + CALL, add_special_tokens=False)
        protocol = Hermes(tokenizer)
        limits = limits_for(max_response_tokens=100_000, max_turns=turns)
        tool = InstantSandbox(output="\n".join(f"{index:6d} {index * index}" for index in range(20)))
        ms: list[float] = []
        for _ in range(repeats + 1):
            started = time.process_time()
            done = await run_trajectories(
                InstantEngine(call_ids), protocol, limits, tool=tool, count=in_flight, in_flight=in_flight, seeded=False
            )
            ms.append(1000 * (time.process_time() - started) / sum(len(each.turns) for each in done))
        return {
            "cpu_ms_per_turn": round(statistics.median(ms[1:]), 3),  # the first repeat is a warm-up
            "cpu_ms_per_turn_each": [round(value, 3) for value in ms],
            "tokens_per_turn": len(call_ids),
        }

    _report("overhead", {"in_flight": in_flight, "turns": turns}, measure())


def _report(case: str, settings: dict[str, Any], measurement: Any) -> None:
    before, started = os.getloadavg()[0], time.perf_counter()
    result = asyncio.run(measurement)
    record = {
        "case": case,
        **settings,
        **result,
        "wall_s": round(time.perf_counter() - started, 1),
        "load_before": round(before, 2),
        "cores": os.cpu_count(),
        "commit": git("describe", "--always", "--dirty") or "unknown",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    typer.echo(json.dumps(record, indent=1))


if __name__ == "__main__":
    get_platform("cpu").activate()
    app()
