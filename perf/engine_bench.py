"""Measures tokens per second of a bare SGLang server, as a reference for the generation of RL.

    python perf/engine_bench.py MODEL --platform cuda --in-flight 64 --arg attention-backend=triton

It sends waves of simultaneous requests with uniformly drawn lengths (``--tokens``), without calls.
The requests return log-probabilities, as in RL. A warm-up wave comes first. ``--precision fp8``
starts the server as verl does for rollout.precision = "fp8". ``--kernels`` profiles some steps of
another wave by kind of kernel.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import httpx
import typer

from retool_mcore.cli.common import guarded
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.server import SglangServer

RECORDED = 20  # engine steps to profile
WARM_UP = (64, 128)  # range of tokens per warm-up request; the warm-up compiles kernels and raises clocks
PREFILL_S = 4.0  # after this time all requests of a wave decode
SEED = 1  # of each request, because RL's requests have seeds, too


@guarded
def bench(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory")],
    *,
    platform: Annotated[str, typer.Option()] = "cuda",
    in_flight: Annotated[int, typer.Option(min=1, help="requests per wave")] = 64,
    tokens: Annotated[tuple[int, int], typer.Option(help="range of tokens per request, uniform")] = (2048, 4096),
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 1.0,
    waves: Annotated[int, typer.Option(min=1, help="waves to measure")] = 1,
    arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server, or a switch")] = None,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    precision: Annotated[str, typer.Option(help="model or fp8, as rollout.precision")] = "model",
    kernels: Annotated[bool, typer.Option(help="also profile a wave's kernels")] = False,
) -> None:
    machine = get_platform(platform)
    machine.activate()
    extra = [part for each in arg or () for part in option(each)]
    if precision == "fp8":
        extra = [*fp8_options(), *extra]
    with (
        tempfile.TemporaryDirectory() as folder,
        SglangServer(
            model, machine, dtype=dtype, log_path=Path(folder) / "server.log", max_running_requests=in_flight,
            extra_args=["--skip-tokenizer-init", *extra],
        ) as server,
    ):  # fmt: skip
        load = Load(server.url, random.Random(0), in_flight, tokens, prompt_tokens, temperature)
        found = asyncio.run(measure_waves(load, waves))
        settings = {
            "in_flight": in_flight, "temperature": temperature, "args": arg or [], "tokens": tokens,
            "prompt_tokens": prompt_tokens, "precision": precision,
        }  # fmt: skip
        typer.echo(json.dumps({**settings, **found, "when": datetime.now(UTC).isoformat(timespec="seconds")}))
        if kernels:  # in a separate line, so that a failed profile does not lose the measurement
            typer.echo(json.dumps(asyncio.run(profile_wave(load))))


def option(text: str) -> list[str]:
    """Convert an ``--arg``, NAME=VALUE or a switch's NAME, to arguments of sglang.launch_server."""
    name, given_value, value = text.partition("=")
    return [f"--{name}", value] if given_value else [f"--{name}"]


def fp8_options() -> list[str]:
    """Options of sglang.launch_server for FP8 as in verl's rollouts, with random weights."""
    from verl.utils.sglang.sglang_fp8_utils import build_sglang_fp8_quant_config

    override = {"quantization_config": build_sglang_fp8_quant_config()}
    return ["--quantization", "fp8", "--json-model-override-args", json.dumps(override), "--load-format", "dummy"]


@dataclass
class Load:
    """The requests of a wave: random prompts and uniformly drawn lengths."""

    url: str
    draw: random.Random
    in_flight: int
    tokens: tuple[int, int]
    prompt_tokens: int
    temperature: float

    def bodies(self, tokens: tuple[int, int]) -> list[dict[str, Any]]:
        """The bodies of a wave's requests, with ``tokens`` as the range of sampled tokens."""
        lengths = [self.draw.randint(*tokens) for _ in range(self.in_flight)]
        return [
            {
                "input_ids": [self.draw.randrange(10, 800) for _ in range(self.prompt_tokens)],
                "sampling_params": {
                    "temperature": self.temperature, "top_p": 1.0, "top_k": -1, "max_new_tokens": length,
                    "skip_special_tokens": False, "no_stop_trim": True, "sampling_seed": SEED, "ignore_eos": True,
                },
                "return_logprob": True,
            }
            for length in lengths
        ]  # fmt: skip


async def wave(load: Load, tokens: tuple[int, int]) -> dict[str, Any]:
    """Flush the cache, as before a step of RL, send a wave and time it until the last answer.

    If this process's ``client_cpu_s`` is close to ``seconds``, the client was the bottleneck.
    """
    bodies = load.bodies(tokens)
    request_s: list[float] = []
    sampled = 0

    async with session(load.url) as client:
        await post(client, "/flush_cache")

        async def one(body: Mapping[str, Any]) -> None:
            nonlocal sampled
            started = time.perf_counter()
            answer = await post(client, "/generate", body)
            sampled += len(answer["output_ids"])
            request_s.append(time.perf_counter() - started)

        started, spent = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for body in bodies:
                tasks.create_task(one(body))
        seconds, client_cpu_s = time.perf_counter() - started, time.process_time() - spent
    return {
        "seconds": round(seconds, 3),
        "client_cpu_s": round(client_cpu_s, 3),
        "tokens": sampled,
        "tokens_per_s": round(sampled / seconds, 1),
        "requests_per_s": round(len(bodies) / seconds, 1),
        "request_s": round(sum(request_s) / len(request_s), 3),
    }


def session(url: str) -> aiohttp.ClientSession:
    """A client without limits. It is aiohttp's, because httpx scans its connections per request."""
    connector, no_timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    parsed = httpx.URL(url)
    headers = {"Authorization": f"Bearer {parsed.password}"}
    address = str(parsed.copy_with(userinfo=b""))
    return aiohttp.ClientSession(address, headers=headers, connector=connector, timeout=no_timeout, trust_env=False)


async def post(client: aiohttp.ClientSession, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The server's answer, parsed if it is JSON. Raises RuntimeError if the server refuses."""
    async with client.post(path, json=body) as answer:
        if not answer.ok:
            raise RuntimeError(f"{path}: {answer.status} {(await answer.text())[:500]}")
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def measure_waves(load: Load, waves: int) -> dict[str, Any]:
    warm_up = await wave(load, WARM_UP)
    found = [await wave(load, load.tokens) for _ in range(waves)]
    return {"tokens_per_s": [each["tokens_per_s"] for each in found], "waves": found, "warm_up": warm_up}


async def profile_wave(load: Load) -> dict[str, Any]:
    """Profile some steps of another wave while all requests decode."""
    with tempfile.TemporaryDirectory() as folder:
        profile = {"output_dir": folder, "activities": ["GPU"], "with_stack": False, "num_steps": RECORDED}
        running = asyncio.create_task(wave(load, load.tokens))
        await asyncio.sleep(PREFILL_S)
        async with session(load.url) as client:
            await post(client, "/start_profile", profile)
        await running
        from kernels import read_trace

        return time_shares(read_trace(min(Path(folder).rglob("*.trace.json.gz"))))


def time_shares(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the time from the first to the last kernel, by kind and kernel.

    ``events``: a trace of torch's profiler.
    """
    from kernels import kernels_of, shares

    spans = list(kernels_of(events))
    start, end = min(begins for _, begins, _ in spans), max(ends for *_, ends in spans)
    by_kind = {kind: round(used / (end - start), 4) for kind, used in shares(spans, start, end).items()}
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, begins, ends in spans:
        by_name[name[:100]] += ends - begins
    most = {
        name: round(used / (end - start), 4) for name, used in sorted(by_name.items(), key=lambda each: -each[1])[:15]
    }
    return {"recorded_ms": round((end - start) * 1e3, 2), "kinds": by_kind, "kernels": most}


if __name__ == "__main__":
    typer.run(bench)
