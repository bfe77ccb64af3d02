"""A step of RL on 8 to 4,096 GPUs, response by response, on the planner's times: what breaks first.

    python perf/scale.py configs/rl_qwen2.5_7b_h200x8.toml Qwen2.5-7B
    python perf/scale.py configs/rl_qwen2.5_7b_h200x8.toml Qwen2.5-7B --set train.mode=async ...

A discrete-event simulation. Responses of log-normal lengths start, sample turns beside each other
in their engine, wait for the sandbox's cores, and end; then the trainer has its phases. A decoding
step, a pass, a sync and the driver take what `retool plan` says (planner/calibration.py); nothing
here is fitted. tests/perf/test_scale.py holds it to the recorded rows of RL. Work grows with the
GPUs: so many prompts, and CORES of a node for the sandbox, for each 8 of them. Where a step waits
for so many responses of any engines, and not for the slowest, REPRESENTED engines stand for all.
"""

from __future__ import annotations

import heapq
import html
import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.config import RlConfig, load_config
from retool_mcore.model.published import PUBLISHED
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.generation import Engines, calls_of
from retool_mcore.planner.hardware import DEVICES, Hardware
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.steptime import sync_s

app = typer.Typer(pretty_exceptions_enable=False)
SIZES = (8, 64, 512, 4096)
SPREAD = 0.8  # of the logarithm of a response's length
CORES = 64  # of a node, for the sandbox
WARM, COUNTED = 3, 4  # steps of the modes in which one step's responses run into the next
REPRESENTED = 64  # engines that stand for all, in these modes


@dataclass
class Response:
    """What is left of it: turns of so many sampled tokens, each but the last ended by a call."""

    turns: deque[float]
    context: float  # tokens before the next one
    result: float  # tokens that a call's result adds
    told: bool = False  # a result, which the next turn's prefill reads


@dataclass
class Engine:
    """Responses that get a token each in every decoding step."""

    model: Engines
    slots: int
    now_s: float = 0.0
    steps: float = 0.0  # decoding steps so far
    step_s: float = 0.0
    version: int = 0
    base: float = 0.0  # context of all that run, less the steps that each has made
    prefilled: float = -1.0  # the decoding step of the last prefill, which all turns share that start in it
    running: list[tuple[float, int, Response]] = field(default_factory=list[tuple[float, int, Response]])
    waiting: deque[Response] = field(default_factory=deque[Response])

    def advance(self, now_s: float) -> None:
        if self.running and now_s > self.now_s:
            self.steps += (now_s - self.now_s) / self.step_s
        self.now_s = max(self.now_s, now_s)

    def fill(self, number: int) -> None:
        while self.waiting and len(self.running) < self.slots:
            response = self.waiting.popleft()
            if response.told and self.steps >= self.prefilled + 1:
                self.now_s, self.prefilled = self.now_s + self.model.launch_s, self.steps
            self.base += response.context - self.steps
            heapq.heappush(self.running, (self.steps + response.turns[0], number, response))
            number += 1

    def next_end_s(self) -> float:
        """When the next turn ends, if nothing else starts before."""
        self.version += 1
        ahead, count = max(0.0, self.running[0][0] - self.steps), len(self.running)
        context = self.base + count * (self.steps + ahead / 2)
        self.step_s = self.model.step_s(count, context)
        return self.now_s + ahead * self.step_s


class Rollout:
    """All engines of a run, and the cores of its sandbox, from one event to the next."""

    def __init__(self, engines: Engines, count: int, *, cores: int, call_s: float) -> None:
        slots = max(1, int(engines.slots[0]))
        self.engines = [Engine(engines, slots) for _ in range(count)]
        self.call_s, self.cores = call_s, [0.0] * cores
        self.events: list[tuple[float, int, int, int, Response | None]] = []
        self.now_s, self.number, self.done, self.queued_s = 0.0, 0, 0, 0.0

    def start(self, at: int, response: Response) -> None:
        self._at(self.now_s, at, -1, response)

    def run(self, until_done: float, until_s: float = float("inf")) -> None:
        """Until so many responses have ended in all, or until a time."""
        while self.events and self.done < until_done and self.events[0][0] <= until_s:
            self.now_s, _, at, version, response = heapq.heappop(self.events)
            engine = self.engines[at]
            if response is None and version != engine.version:
                continue
            engine.advance(self.now_s)
            if response is not None:
                engine.waiting.append(response)
            else:
                self._end_turns(at, engine)
            if self._same_again(at):
                continue
            engine.fill(self._count())
            if engine.running:
                self._at(engine.next_end_s(), at, engine.version, None)
        if until_s != float("inf") and self.done < until_done:
            self.now_s = until_s

    def _same_again(self, at: int) -> bool:
        """Whether a response reaches this engine at this very time: a batch does."""
        return bool(self.events) and self.events[0][:1] == (self.now_s,) and self.events[0][2:4] == (at, -1)

    def pause(self, seconds: float, *, prefill: bool) -> None:
        """All engines stand still; with ``prefill`` they then compute their caches again."""
        self.now_s += seconds
        moved = [(time + seconds, *rest) for time, *rest in self.events]
        self.events = moved  # as a heap it is what it was
        for at, engine in enumerate(self.engines):
            engine.now_s += seconds
            if prefill and engine.running:
                engine.advance(self.now_s)
                context = engine.base + len(engine.running) * engine.steps
                engine.now_s += engine.model.prefill_s(context)
                self._at(engine.next_end_s(), at, engine.version, None)

    def _end_turns(self, at: int, engine: Engine) -> None:
        while engine.running and engine.running[0][0] <= engine.steps + 1e-6:
            ends, _, response = heapq.heappop(engine.running)
            said = response.turns.popleft()
            engine.base -= response.context - (ends - said)
            response.context, response.told = response.context + said + response.result, True
            if not response.turns:
                self.done += 1
                continue
            free_s = heapq.heappop(self.cores)
            begun_s = max(self.now_s, free_s)
            heapq.heappush(self.cores, begun_s + calibrated("execution_cpu_s"))
            self.queued_s += begun_s - self.now_s
            self._at(begun_s + self.call_s, at, -1, response)

    def _at(self, time_s: float, engine: int, version: int, response: Response | None) -> None:
        heapq.heappush(self.events, (time_s, self._count(), engine, version, response))

    def _count(self) -> int:
        self.number += 1
        return self.number


@dataclass(frozen=True, kw_only=True)
class Simulated:
    gpus: int
    step_s: float
    tokens_per_s_a_gpu: float
    requests_per_s: float  # of one engine
    queued_s: float  # that a response waits for a core of the sandbox
    seconds: dict[str, float]  # of a step and the metrics after it, by what is waited for


def simulate(
    config: RlConfig,
    shape: ModelShape,
    hardware: Hardware,
    lengths: Lengths,
    *,
    drawn: list[float],
    cores: int,
    represented: int = REPRESENTED,
) -> Simulated:
    """A step, or the mean of some; ``drawn``: lengths in the order of starts, again and again."""
    plan = make_plan(config, shape, hardware, lengths=lengths)
    assert plan.rollout is not None, "RL has engines"
    training = {name: seconds for name, seconds in plan.phases.items() if name not in ("generate", "metrics")}
    training_s, mode = sum(training.values()), config.train.mode
    engines = Engines.of(config, shape, hardware, plan.rollout.kv_tokens, lengths)
    calls = round(calls_of(config, lengths))
    wait_s = calibrated("tool_wait_s") if lengths.tool_s is None else lengths.tool_s / max(1, calls)
    count = engines.count if mode == "sync" else min(engines.count, represented)
    rollout = Rollout(engines, count, cores=max(1, round(cores * count / engines.count)), call_s=wait_s)
    responses, batch, started = round(engines.responses * engines.count), round(engines.responses * count), 0

    def start(more: int) -> None:
        nonlocal started
        for _ in range(more):
            length = drawn[started % len(drawn)]
            parts = [length * lengths.sampled / (calls + 1)] * (calls + 1)
            result = length * (1 - lengths.sampled) / calls if calls else 0.0
            rollout.start(started % count, Response(deque(parts), lengths.prompt, result))
            started += 1

    prefill_s = engines.prefill_s(engines.responses * lengths.prompt / config.rollout.group_size)
    start(round(batch * (1 + engines.ahead)))
    if mode == "sync":
        rollout.run(batch)
        step_s = rollout.now_s + engines.start_s(config.rollout.group_size) + training_s
    else:
        took, pause_s = list[float](), sync_s(shape, hardware, running=True, lora=config.lora)
        for number in range(WARM + COUNTED):
            begun_s = rollout.now_s
            _step(rollout, batch * (number + 1), training_s, pause_s, mode)
            took.append(rollout.now_s - begun_s)
            rollout.run(float("inf"), rollout.now_s + plan.phases["metrics"])  # engines go on between two steps
            start(batch)
        step_s = sum(took[WARM:]) / COUNTED + (prefill_s if mode == "partial_rollout" else 0.0)  # others run meanwhile
    last_s = rollout.now_s if mode == "sync" else 0.0
    waited_s = sum(last_s - engine.now_s for engine in rollout.engines) / engines.count if mode == "sync" else 0.0
    generation_s = step_s - training_s
    seconds = {"sampling": generation_s - waited_s, "slowest engine": waited_s} | _parts(training)
    seconds["metrics"] = plan.phases["metrics"]  # after a step, and before the next
    of_engine = responses * (calls + 1) / engines.count / (generation_s if mode == "sync" else step_s)
    return Simulated(
        gpus=hardware.count, step_s=step_s, seconds=seconds,
        tokens_per_s_a_gpu=plan.tokens_per_step / (step_s + seconds["metrics"]) / hardware.count,
        requests_per_s=of_engine, queued_s=rollout.queued_s / max(1, rollout.done),
    )  # fmt: skip


def _step(rollout: Rollout, done: int, training_s: float, paused_s: float, mode: str) -> None:
    """One step of a mode with responses in flight: ``done`` have ended, and were learnt from."""
    rollout.run(done)
    if mode == "async":
        rollout.run(float("inf"), rollout.now_s + training_s - paused_s)
        rollout.pause(paused_s, prefill=True)
    else:
        rollout.pause(training_s, prefill=True)


def _parts(training: dict[str, float]) -> dict[str, float]:
    """The trainer's phases: what the driver does for all responses, and what grows with no GPU.

    Each data-parallel rank fetches its own responses, so that is part of its passes.
    """
    driver, sync = training["advantage"], training["weight_sync"]
    return {"devices' passes": sum(training.values()) - driver - sync, "driver": driver, "weight sync": sync}


def drawn_lengths(mean: float, limit: float, count: int, seed: int = 0) -> list[float]:
    """Log-normal lengths up to ``limit``, scaled to their mean."""
    draw = random.Random(seed)
    values = [draw.lognormvariate(0.0, SPREAD) for _ in range(count)]
    scale = mean * len(values) / sum(values)
    return [min(limit, max(1.0, value * scale)) for value in values]


def at_size(
    config: Path, shape: ModelShape, gpus: int, *, device: str, settings: list[str], mean: float, prompts: int
) -> Simulated:
    """The configuration on so many GPUs; ``prompts``: of a step, for each 8 of them."""
    made = load_config(RlConfig, config, settings)
    times = gpus // 8
    prompts *= times
    more = [f"cluster.nodes={times}", f"train.prompts_per_step={prompts}", f"train.mini_batch_prompts={prompts}"]
    if made.train.mode == "async":
        more.append(f"rollout.gpus={made.rollout.gpus * times}")
    made = load_config(RlConfig, config, [*settings, *more])
    limit = made.rollout.max_response_tokens
    responses = prompts * made.rollout.group_size
    values = drawn_lengths(mean, limit, min(responses, 100_000))
    prompt = made.data.max_prompt_tokens / 4
    lengths = Lengths(shortest=min(values), mean=sum(values) / len(values), longest=max(values), prompt=prompt,
                      limit=max(values), sampled=0.8)  # fmt: skip
    return simulate(made, shape, Hardware(DEVICES[device], gpus), lengths, drawn=values, cores=CORES * times)


def picture(found: list[Simulated], title: str) -> str:
    """The parts of a step by size, as SVG."""
    title = html.escape(title)
    names, colours = list(found[0].seconds), ("#4c78a8", "#e45756", "#72b7b2", "#f58518", "#54a24b", "#b279a2")
    most, width, height = max(sum(each.seconds.values()) for each in found), 640, 320
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 60}" font-family="sans-serif">'
    ]
    parts.append(f'<text x="10" y="18" font-size="14">{title}: seconds from a step to the next</text>')
    for column, each in enumerate(found):
        x, top = 40 + column * 150, float(height)
        for name, colour in zip(names, colours, strict=False):
            tall = max(0.0, each.seconds[name]) / most * (height - 60)
            top -= tall
            parts.append(f'<rect x="{x}" y="{top:.1f}" width="80" height="{tall:.1f}" fill="{colour}"/>')
        took_s = sum(each.seconds.values())
        parts.append(f'<text x="{x}" y="{height + 16}" font-size="12">{each.gpus} GPUs, {took_s:,.0f} s</text>')
    for place, (name, colour) in enumerate(zip(names, colours, strict=False)):
        parts.append(f'<text x="{10 + place * 105}" y="{height + 44}" font-size="12" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


@app.command()
def main(
    config: Annotated[Path, typer.Argument(help="a configuration of RL for 8 GPUs")],
    model: Annotated[str, typer.Argument(help=", ".join(PUBLISHED))],
    *,
    device: Annotated[str, typer.Option(help=", ".join(DEVICES))] = "h200",
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
    mean: Annotated[float, typer.Option(help="tokens of a response")] = 4000.0,
    prompts: Annotated[int, typer.Option(help="of a step, for each 8 GPUs")] = 32,
    sizes: Annotated[list[int] | None, typer.Option("--gpus", help="multiples of 8")] = None,
    image: Annotated[Path | None, typer.Option("--picture", help="an SVG of it")] = None,
) -> None:
    """One JSON object for each size, and what grows most in a step."""
    given = {"device": device, "settings": settings or [], "mean": mean, "prompts": prompts}
    found = [at_size(config, PUBLISHED[model], gpus, **given) for gpus in sizes or SIZES]
    for each in found:
        parts = {name: round(seconds, 2) for name, seconds in each.seconds.items()}
        line = {
            "gpus": each.gpus,
            "step_s": round(each.step_s, 1),
            "tokens_per_s_a_gpu": round(each.tokens_per_s_a_gpu),
            "requests_per_s_an_engine": round(each.requests_per_s, 1),
            "queued_s": round(each.queued_s, 3),
        }
        typer.echo(json.dumps(line | {"seconds": parts}))
    grown = {name: found[-1].seconds[name] - found[0].seconds[name] for name in found[0].seconds}
    typer.echo(f"breaks first: {max(grown, key=lambda name: grown[name])}")
    if image is not None:
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_text(picture(found, config.stem), encoding="utf-8")


if __name__ == "__main__":
    app()
