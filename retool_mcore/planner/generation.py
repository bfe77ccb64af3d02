"""Seconds that the engines take for a step's responses: a wave of them, or a steady stream."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from retool_mcore.config import RlConfig
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import Hardware
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.memory import RolloutMemory, captured_by
from retool_mcore.planner.steptime import sync_s

REPRESENTED = 128  # responses that stand for all of an engine's
GOLDEN = 0.6180339887  # multiples of it, less their whole part, are spread evenly in any order


@dataclass(frozen=True, kw_only=True)
class Decoding:
    seconds: float  # of a step: all of it, or in mode "async" what the trainer waits
    host_s: float  # of these, what grows with the host's time; 0 in mode "async", which hides some of it
    longest_turn_s: float  # a turn of the longest response, among as many as an engine samples at once
    concurrency: float  # the most concurrent responses in one engine; in mode "async", how many on average
    tokens_per_s: float  # of all engines, while they sample
    limit: str  # what decoding waits for


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Equal engines, and the responses that each has in a step."""

    shape: ModelShape
    hardware: Hardware
    tp: int
    fp8: bool
    count: int
    responses: float  # of a step, in one engine
    ahead: float  # batches in flight beside the one that a step waits for
    max_running: int
    kv_tokens: int  # of one engine
    lengths: Lengths
    captured: float = math.inf  # a decoding step of more responses is launched kernel by kernel
    calls: float = 0.0  # of a response; the turn after each begins with a prefill
    host: float = 1.0  # how many times its usual time the host takes

    @staticmethod
    def of(config: RlConfig, shape: ModelShape, hardware: Hardware, kv_tokens: int, lengths: Lengths) -> Engines:
        r, t = config.rollout, config.train
        count = (r.gpus or hardware.count) // r.engine_tp
        return Engines(
            shape=shape, hardware=hardware, tp=r.engine_tp, fp8=r.precision == "fp8",
            count=count, responses=t.prompts_per_step * r.group_size / count,
            ahead=0.0 if t.mode == "sync" else t.prefetch_batches,
            max_running=r.max_running_requests, kv_tokens=kv_tokens, lengths=lengths,
            captured=captured_by(r, hardware.device),
            calls=calls_of(config, lengths),
        )  # fmt: skip

    @property
    def slots(self) -> tuple[float, str]:
        """How many responses an engine samples at once, and what limits it."""
        limits = {
            self.max_running: "rollout.max_running_requests",
            self.responses * (1 + self.ahead): "responses",
            self.kv_tokens / self.lengths.context: "cache",
        }
        return max(1.0, min(limits)), limits[min(limits)]

    def step_s(self, at_once: float, context: float) -> float:
        """Seconds of a decoding step: the host's for its requests, and the device's, or the host's
        for its launches where it is larger than what is captured.
        """
        device_s = decode_device_s(self.shape, self.hardware, self.tp, at_once, context, fp8=self.fp8)
        requests_s = self.host * (calibrated("decode_step_s") + at_once * calibrated("decode_request_s"))
        return requests_s + (device_s if at_once <= self.captured else max(device_s, self.launch_s))

    @property
    def launch_s(self) -> float:
        """Seconds in which the host launches a pass kernel by kernel, as it does every prefill."""
        return self.host * self.shape.layers * calibrated("launch_layer_s")

    def prefill_s(self, tokens: float) -> float:
        """Seconds of one engine to compute the cache of ``tokens``."""
        rate = self.tp * self.hardware.device.flops * calibrated("gemm")
        return 2 * self.shape.compute_params * tokens / rate

    def start_s(self, group_size: int) -> float:
        """Seconds until all responses of a step run: a group shares its prompt's cache, and the
        engine's server takes one request after another.
        """
        prefill_s = self.prefill_s(self.responses * self.lengths.prompt / group_size)
        return prefill_s + self.host * self.responses * calibrated("start_response_s")


def decode(
    shape: ModelShape, hardware: Hardware, config: RlConfig, rollout: RolloutMemory, lengths: Lengths, *,
    training_s: float,
) -> Decoding:  # fmt: skip
    """Decode all responses of one step; ``training_s``: what the trainer does in it.

    In "partial_rollout" the next batches' responses are sampled beside a step's own, so that a wave
    serves more than one step.
    """
    engines = Engines.of(config, shape, hardware, rollout.kv_tokens, lengths)
    (slots, limit), tokens = engines.slots, engines.count * engines.responses * lengths.mean
    if config.train.mode == "async":
        pause_s = sync_s(shape, hardware, running=True, lora=config.lora)
        seconds, slots = stream(engines, training_s, pause_s)
        return Decoding(
            seconds=seconds - training_s, host_s=0.0, concurrency=slots, tokens_per_s=tokens / seconds,
            longest_turn_s=lengths.limit * engines.step_s(slots, slots * lengths.context),
            limit="the trainer" if seconds == training_s else limit,
        )  # fmt: skip
    batches = 1 + engines.ahead
    wave_s = wave(engines, engines.responses * batches)
    alone_s = wave(engines, 1)
    # No turn outlasts the wave that it is in, in which fewer and fewer run beside it.
    turn_s = min(wave_s, lengths.limit * engines.step_s(slots, slots * lengths.context))
    starts_s = engines.start_s(config.rollout.group_size)
    twice = replace(engines, host=2.0)
    host_s = (wave(twice, engines.responses * batches) - wave_s) / batches
    host_s += twice.start_s(config.rollout.group_size) - starts_s
    seconds = wave_s / batches + starts_s + _tools_s(config, lengths)
    return Decoding(
        seconds=seconds, host_s=host_s, longest_turn_s=turn_s, concurrency=slots, tokens_per_s=tokens / seconds,
        limit="the longest response" if wave_s < 2 * alone_s else limit,
    )  # fmt: skip


@lru_cache(maxsize=4096)  # a search asks for the same engines beside many ways to train
def wave(engines: Engines, responses: float) -> float:
    """Seconds until the last of an engine's ``responses`` ends, where each starts as another ends.

    All that run get a token in each decoding step. One of them is as long as any may become.
    """
    lengths, (slots, _) = engines.lengths, engines.slots
    count = max(1, round(min(responses, REPRESENTED)))
    weight, calls = responses / count, max(1, round(engines.calls)) if engines.calls else 0
    drawn = [*lengths.quantiles(count)[:-1], lengths.limit]
    order = sorted(range(count), key=lambda number: (number + 0.5) * GOLDEN % 1)
    waiting = [drawn[number] * lengths.sampled for number in order]
    places = max(1, round(min(slots, responses) / weight))
    ends: list[tuple[float, float]] = []  # the steps at which responses end and started
    turns = list[float]()  # the steps at which later turns start
    now, started, seconds = 0.0, 0.0, 0.0
    while waiting or ends:
        while waiting and len(ends) < places:
            steps = waiting.pop()
            heapq.heappush(ends, (now + steps, now))
            started += now
            turns += [now + steps * number / (calls + 1) for number in range(1, calls + 1)]
        steps, running = ends[0][0] - now, len(ends)
        context = running * (lengths.prompt + (now + steps / 2) / lengths.sampled) - started / lengths.sampled
        seconds += steps * engines.step_s(running * weight, context * weight)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            started -= heapq.heappop(ends)[1]
    return seconds + prefills(turns, weight * engines.calls / max(1, calls)) * engines.launch_s


def prefills(starts: Sequence[float], weight: float) -> float:
    """How many prefills serve turns that start at these steps, each for ``weight`` of them.

    Turns that start in one decoding step share a prefill. Those of a weight start at random between
    the step before and their own.
    """
    ordered = sorted(starts)
    between = [after - before for before, after in pairwise(ordered) if after > before]
    return (min(1.0, weight) if ordered else 0.0) + sum(steps * -math.expm1(-weight / steps) for steps in between)


def stream(engines: Engines, training_s: float, pause_s: float) -> tuple[float, float]:
    """Seconds of a step in mode "async", and how many responses an engine then has at once.

    A batch is in flight from its start to the end of its training, and so many batches are in
    flight: so a step takes at least that time over their number. A weight sync pauses engines for
    ``pause_s``, and they then compute the cache of their running responses again.
    """
    lengths, (slots, _) = engines.lengths, engines.slots
    at_once, seconds = min(slots, engines.responses), training_s
    for _ in range(50):
        step_s = engines.step_s(at_once, at_once * lengths.context)
        step_s += -math.expm1(-at_once * engines.calls / (lengths.mean * lengths.sampled)) * engines.launch_s
        stopped_s = pause_s + engines.prefill_s(at_once * lengths.context)
        token_s = lengths.sampled * step_s / max(0.1, 1 - stopped_s / seconds)
        batch_s = lengths.limit * token_s + training_s
        filled_s = engines.responses * lengths.mean * lengths.sampled * step_s / slots + stopped_s
        seconds = max(training_s, batch_s / (1 + engines.ahead), filled_s)
        at_once = (at_once + min(slots, engines.responses * lengths.mean * token_s / seconds)) / 2
    return seconds, at_once


def calls_of(config: RlConfig, lengths: Lengths) -> float:
    """Calls of a response: as was recorded, or as is usual; 0 without a tool."""
    if not config.rollout.tool:
        return 0.0
    return calibrated("calls") if lengths.calls is None else lengths.calls


def _tools_s(config: RlConfig, lengths: Lengths) -> float:
    if not config.rollout.tool:
        return 0.0
    return calls_of(config, lengths) * calibrated("tool_wait_s") if lengths.tool_s is None else lengths.tool_s


def decode_device_s(
    shape: ModelShape, hardware: Hardware, tp: int, at_once: float, context: float, *, fp8: bool
) -> float:
    """Seconds of the device to decode a token of each of ``at_once`` sequences.

    They have ``context`` tokens in all. The products wait for their weights or for arithmetic;
    attention, which comes after them, waits for the cache. One in FP8 is read in the same time:
    Triton's attention was 0 % faster by it with 64 requests of 7B, 2 % with 256 (H100, 7646647).
    """
    touched = _touched_params(shape, at_once)
    weights = 2 * touched - (touched - shape.head_params if fp8 else 0)  # the head's stay as they are
    bandwidth = tp * hardware.device.bandwidth
    products_s = max(
        weights / (bandwidth * calibrated("weights_read")),
        2 * shape.compute_params * at_once / (tp * hardware.device.flops * calibrated("gemm")),
    )
    cache_s = context * shape.kv_bytes(fp8=False) / (bandwidth * calibrated("cache_read"))
    layer_s = calibrated("decode_layer_s") + (calibrated("decode_fp8_s") if fp8 else 0.0)
    if tp > 1:
        sent = 2 * 2 * shape.hidden * at_once * (tp - 1) / tp
        layer_s += 2 * (calibrated("all_reduce_s") + sent / (hardware.link(tp) * calibrated("link")))
    return products_s + cache_s + shape.layers * layer_s


def _touched_params(shape: ModelShape, at_once: float) -> float:
    """Weights read to decode one token of each of ``at_once`` sequences.

    An expert is read if at least one of the tokens is routed to it.
    """
    if not shape.experts:
        return shape.compute_params
    experts = 3 * shape.hidden * shape.ffn * shape.layers
    read = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** at_once)
    return shape.compute_params + experts * (read - shape.experts_per_token)
