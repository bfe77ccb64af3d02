"""Tokens per second of a bare SGLang server, to compare an RL step's generation with.

    python perf/engine_bench.py MODEL --platform cuda --in-flight 64 --arg attention-backend=triton

Sends one wave of requests at once, of the lengths that perf/scripted.py plans, without calls. They
ask for log-probabilities, as RL does. A short warm-up wave comes first. ``--precision fp8`` gives
the server what verl gives it for rollout.precision = "fp8". ``--kernels`` records some steps of
another wave and says where a step's time goes.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from gaps import read_trace

from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.server import SglangServer

RECORDED = 20  # steps of the engine
WARM_UP = (64, 128)  # tokens of a warm-up's request: kernels are compiled, clocks are up
PREFILL_S = 4.0  # after which all requests of a wave decode


def bench(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory")],
    *,
    platform: Annotated[str, typer.Option()] = "cuda",
    in_flight: Annotated[int, typer.Option(min=1, help="requests of a wave")] = 64,
    tokens: Annotated[tuple[int, int], typer.Option(help="sampled for one request, drawn evenly")] = (2048, 4096),
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 1.0,
    waves: Annotated[int, typer.Option(min=1, help="measured")] = 1,
    arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server")] = None,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    precision: Annotated[str, typer.Option(help="model or fp8, as rollout.precision")] = "model",
    kernels: Annotated[bool, typer.Option(help="record a wave's kernels, too")] = False,
) -> None:
    place = get_platform(platform)
    place.activate()
    extra = [part for each in arg or () for part in (f"--{each.partition('=')[0]}", each.partition("=")[2])]
    if precision == "fp8":
        extra += in_fp8()
    with (
        tempfile.TemporaryDirectory() as folder,
        SglangServer(
            model, place, dtype=dtype, log_path=Path(folder) / "server.log", max_running_requests=in_flight,
            extra_args=["--skip-tokenizer-init", *extra],
        ) as server,
    ):  # fmt: skip
        work = Work(server.url, random.Random(0), in_flight, tokens, prompt_tokens, temperature)
        asyncio.run(wave(replace(work, tokens=WARM_UP)))
        rates = [asyncio.run(wave(work)) for _ in range(waves)]
        found = asyncio.run(recorded(work)) if kernels else {}
    record: dict[str, Any] = {
        "in_flight": in_flight,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "temperature": temperature,
        "args": arg or [],
        "precision": precision,
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
    }
    typer.echo(json.dumps(record))


def in_fp8() -> list[str]:
    """Options of sglang.launch_server for FP8 as verl's rollouts have it, with random weights."""
    from verl.utils.sglang.sglang_fp8_utils import build_sglang_fp8_quant_config

    override = {"quantization_config": build_sglang_fp8_quant_config()}
    return ["--quantization", "fp8", "--json-model-override-args", json.dumps(override), "--load-format", "dummy"]


@dataclass(frozen=True)
class Work:
    """Waves of requests, as the options say."""

    url: str
    draw: random.Random
    in_flight: int
    tokens: tuple[int, int]
    prompt_tokens: int
    temperature: float


async def wave(work: Work) -> float:
    """Sampled tokens per second from the first request to the last answer."""
    draw = work.draw
    lengths = [draw.randint(*work.tokens) for _ in range(work.in_flight)]
    prompts = [[draw.randrange(10, 800) for _ in range(work.prompt_tokens)] for _ in lengths]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=work.url, timeout=None, limits=limits, trust_env=False) as client:

        async def one(prompt: list[int], length: int) -> int:
            sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": work.temperature}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = await client.post("/generate", json=body)
            answer.raise_for_status()
            return len(answer.json()["output_ids"])

        started = time.perf_counter()
        sampled = await asyncio.gather(*(one(*each) for each in zip(prompts, lengths, strict=True)))
        return sum(sampled) / (time.perf_counter() - started)


async def recorded(work: Work) -> dict[str, Any]:
    """Where the time of RECORDED steps goes, in which all requests decode."""
    with tempfile.TemporaryDirectory() as folder:
        running = asyncio.create_task(wave(work))
        await asyncio.sleep(PREFILL_S)
        async with httpx.AsyncClient(base_url=work.url, timeout=None, trust_env=False) as client:
            wanted = {"output_dir": folder, "num_steps": RECORDED, "activities": ["GPU"]}
            (await client.post("/start_profile", json=wanted)).raise_for_status()
        await running
        [trace] = Path(folder).rglob("*.trace.json.gz")
        return where_time_goes(read_trace(trace))


def where_time_goes(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the span between the first and the last kernel of a trace of torch's profiler."""
    from kernels import kernels_of, shares

    spans = list(kernels_of(events))
    start, end = min(begins for _, begins, _ in spans), max(ends for *_, ends in spans)
    by_kind = {kind: round(used / (end - start), 4) for kind, used in shares(spans, start, end).items()}
    by_name = Counter[str]()
    for name, begins, ends in spans:
        by_name[name[:100]] += ends - begins
    most = {name: round(used / (end - start), 4) for name, used in by_name.most_common(15)}
    return {"recorded_ms": round((end - start) * 1e3, 2), "kinds": by_kind, "kernels": most}


if __name__ == "__main__":
    typer.run(bench)
