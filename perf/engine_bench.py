"""Tokens per second of a bare SGLang server, to compare an RL step's generation with.

    python perf/engine_bench.py MODEL --platform cuda --in-flight 64 --arg attention-backend=triton
    python perf/engine_bench.py MODEL --replay runs/gsm8k/tool_rl --step 10 --waves 3

Sends one wave of requests at once, of the lengths that perf/scripted.py plans, without calls. They
ask for log-probabilities, as RL does. A warm-up wave comes first. ``--precision fp8`` gives the
server what verl gives it for rollout.precision = "fp8". ``--kernels`` records some steps of another
wave and says where a step's time goes.

``--replay`` sends the responses that an RL run recorded for one step: the same prompts and numbers
of tokens in each turn, with what the tool answered, after the same pauses. The server has the run's
engine_args and precision; ``--arg`` wins over them. Where the run recorded fewer groups than the
step had, those of the nearest steps stand for them. What the run itself needed is printed beside
it. ``--natural`` lets the model end its turns, at the run's temperature: the way to measure drafts
(``--arg speculative-algorithm=NGRAM``), whose gain is in what the model says. Then answers of the
tool are those of the recorded turns, and the numbers of tokens are the model's own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from gaps import read_trace
from replay import Recorded, ends_of
from waves import Asked, Played, Response, flush, planned, play, post, session

from retool_mcore.cli.common import guarded
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.rollout.server import SglangServer
from retool_mcore.verl.keys.rollout import engine_args

RECORDED = 20  # steps of the engine
WARM_UP = (64, 128)  # tokens of a warm-up's request: kernels are compiled, clocks are up
PREFILL_S = 4.0  # after which all requests of a wave decode
EXTEND = re.compile(r"_fwd_kernel(_unified)?$")  # triton's attention over prompts; decoding has other kernels


@guarded
def bench(
    model: Annotated[Path, typer.Argument(help="a Hugging Face directory")],
    *,
    platform: Annotated[str, typer.Option()] = "cuda",
    in_flight: Annotated[int | None, typer.Option(min=1, help="at a time; 64, or all that are replayed")] = None,
    tokens: Annotated[tuple[int, int], typer.Option(help="sampled for one request, drawn evenly")] = (2048, 4096),
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: greedy; 1, or the run's")] = None,
    waves: Annotated[int, typer.Option(min=1, help="measured")] = 1,
    arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server, or a switch")] = None,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    precision: Annotated[str | None, typer.Option(help="model or fp8, as rollout.precision")] = None,
    kernels: Annotated[bool, typer.Option(help="record a wave's kernels, too")] = False,
    replay: Annotated[Path | None, typer.Option(help="a run's folder, with trajectories/")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="the run's; its last on record")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="replayed; an engine's share of the step")] = None,
    pauses: Annotated[bool, typer.Option(help="wait as long as the run's tool took")] = True,
    natural: Annotated[bool, typer.Option(help="the model ends its turns")] = False,
) -> None:
    place = get_platform(platform)
    place.activate()
    if replay is None:
        work = drawn(in_flight or 64, tokens, prompt_tokens)
    else:
        work = replayed(place, replay, step, groups, pauses=pauses, natural=natural, model=model)
    work.asked = replace(work.asked, **given(in_flight=in_flight, temperature=temperature))
    work.settings |= given(precision=precision)
    extra = [part for each in arg or () for part in option(each)]
    if work.settings["precision"] == "fp8":
        extra = [*in_fp8(), *extra]
    with (
        tempfile.TemporaryDirectory() as folder,
        SglangServer(
            model, place, dtype=dtype, log_path=Path(folder) / "server.log", tp=work.tp, engine_args=work.engine_args,
            max_running_requests=min(work.asked.in_flight, work.max_running_requests),
            extra_args=["--skip-tokenizer-init", *extra],
        ) as server,
    ):  # fmt: skip
        work.asked = replace(work.asked, url=server.url)
        found = asyncio.run(measured(work, waves))
        asked = {"in_flight": work.asked.in_flight, "temperature": work.asked.temperature, "args": arg or []}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        typer.echo(json.dumps({**asked, **work.settings, **found, "when": when}))
        if kernels:  # a line of its own: a recording that fails takes no measurement with it
            typer.echo(json.dumps(asyncio.run(recorded(work))))


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def option(text: str) -> list[str]:
    """``--arg``'s NAME=VALUE, or NAME of a switch, as sglang.launch_server takes it."""
    name, given_value, value = text.partition("=")
    return [f"--{name}", value] if given_value else [f"--{name}"]


def in_fp8() -> list[str]:
    """Options of sglang.launch_server for FP8 as verl's rollouts have it, with random weights."""
    from verl.utils.sglang.sglang_fp8_utils import build_sglang_fp8_quant_config

    override = {"quantization_config": build_sglang_fp8_quant_config()}
    return ["--quantization", "fp8", "--json-model-override-args", json.dumps(override), "--load-format", "dummy"]


@dataclass
class Work:
    """What a wave sends, and the server that it is sent to.

    ``speed``: of the run itself. ``record_after_s`` and ``record_steps``: of --kernels; 0 steps:
    from the first to the last.
    """

    warm_up: Callable[[], Sequence[Response]]
    responses: Callable[[], Sequence[Response]]
    asked: Asked
    settings: dict[str, Any]
    speed: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    max_running_requests: int = 1 << 30
    record_after_s: float = 0.0
    record_steps: int = 0


def drawn(in_flight: int, tokens: tuple[int, int], prompt_tokens: int) -> Work:
    """One turn each, of lengths and prompts drawn for each wave."""
    draw = random.Random(0)
    return Work(
        lambda: planned(draw, in_flight, WARM_UP, prompt_tokens),
        lambda: planned(draw, in_flight, tokens, prompt_tokens),
        Asked(url="", in_flight=in_flight),
        {"tokens": tokens, "prompt_tokens": prompt_tokens, "precision": "model"},
        record_after_s=PREFILL_S,
        record_steps=RECORDED,
    )


def replayed(
    place: Platform, run: Path, step: int | None, groups: int | None, *, pauses: bool, natural: bool, model: Path
) -> Work:
    """The responses of a run's step, the same in each wave."""
    recorded = Recorded(run)
    config, rollout = recorded.config, recorded.config.rollout
    step = recorded.last_step() if step is None else step
    count = groups or max(1, config.train.prompts_per_step // recorded.engines)
    responses, others = recorded.of_step(step, count)
    memory = {"mem_fraction_static": rollout.engine_memory_fraction}
    return Work(
        lambda: responses,
        lambda: responses,
        Asked(
            url="",
            in_flight=len(responses),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            pauses=pauses,
            ends=ends_of(config, model) if natural else None,
        ),
        {
            "replay": str(run), "step": step, "responses": len(responses), "groups_of_other_steps": others,
            "pauses": pauses, "natural": natural, "precision": rollout.precision,
        },
        speed=recorded.speed(step, pauses=pauses),
        engine_args={**memory, **engine_args(config, place)},
        tp=rollout.engine_tp,
        max_running_requests=rollout.max_running_requests,
    )  # fmt: skip


async def wave(work: Work) -> Played:
    """One that finds the server's caches empty, as a step of RL does after its weight sync."""
    await flush(work.asked.url)
    return await play(work.asked, work.responses())


async def measured(work: Work, waves: int) -> dict[str, Any]:
    warm_up = await play(work.asked, work.warm_up())
    played = [await wave(work) for _ in range(waves)]
    found: dict[str, Any] = {
        "tokens_per_s": [round(each.tokens_per_s, 1) for each in played],
        "waves": [each.told() for each in played],
        "warm_up": warm_up.told(),
    }
    if work.speed:
        middle = statistics.median(each.tokens_per_s for each in played)
        found |= {"run": work.speed, "bare_over_run": round(middle / work.speed["tokens_per_s"], 3)}
    return found


async def recorded(work: Work) -> dict[str, Any]:
    """Where the time of another wave goes, or of some steps in which all requests decode."""
    with tempfile.TemporaryDirectory() as folder:
        wanted: dict[str, Any] = {"output_dir": folder, "activities": ["GPU"], "with_stack": False}
        async with session(work.asked.url) as client:
            if work.record_steps:
                running = asyncio.create_task(wave(work))
                await asyncio.sleep(work.record_after_s)
                await post(client, "/start_profile", {**wanted, "num_steps": work.record_steps})
                await running
            else:
                await post(client, "/start_profile", wanted)
                await wave(work)
                await post(client, "/stop_profile")
        return where_time_goes(read_trace(min(Path(folder).rglob("*.trace.json.gz"))))


def where_time_goes(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the span between the first and the last kernel of a trace of torch's profiler."""
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
    stages = {stage: round(used / (end - start), 4) for stage, used in by_stage(spans).items()}
    return {"recorded_ms": round((end - start) * 1e3, 2), "stages": stages, "kinds": by_kind, "kernels": most}


def by_stage(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds of prefill, of decoding, and between kernels, where the device waits for the host.

    ``spans`` are in their order. A kernel is of the stage of the last attention before it: so the
    head and the sampling are where they belong, and what comes before a pass's first attention is
    in the stage before. {} where no triton kernel tells the stages apart.
    """
    from kernels import kind_of

    stage_of = {
        name: "prefill" if EXTEND.match(name) else "decode" for name, *_ in spans if kind_of(name) == "attention"
    }
    if "prefill" not in stage_of.values():
        return {}
    stage = next(stage_of[name] for name, *_ in spans if name in stage_of)
    found, now = {"prefill": 0.0, "decode": 0.0, "host": 0.0}, spans[0][1]
    for name, begins, ends in spans:
        stage = stage_of.get(name, stage)
        found["host"] += max(0.0, begins - now)
        found[stage] += max(0.0, ends - max(begins, now))
        now = max(now, ends)
    return found


if __name__ == "__main__":
    typer.run(bench)
