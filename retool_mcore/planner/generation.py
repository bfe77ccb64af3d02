"""Estimates how long the engines take to generate a step's responses."""

import math
from dataclasses import dataclass

from retool_mcore.config import RlConfig
from retool_mcore.errors import ConfigError
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import Hardware
from retool_mcore.planner.lengths import SAMPLES, Lengths
from retool_mcore.planner.memory import RolloutMemory
from retool_mcore.planner.steptime import sync_s


@dataclass(frozen=True, kw_only=True)
class Decoding:
    seconds: float  # generation time per step; in mode "async", only the time that the trainer waits
    longest_turn_s: float  # a turn as long as the longest response, with all slots of the engine in use
    concurrency: float  # concurrent responses per engine
    tokens_per_s: float  # of all engines together, during generation
    limit: str  # the bottleneck of generation


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Identical engines and their load per step."""

    shape: ModelShape
    hardware: Hardware
    tp: int
    fp8: bool
    count: int
    responses: float  # per step and engine
    group_size: int
    ahead: float  # batches in flight in addition to the one that the step waits for
    max_running: int
    kv_tokens: int  # KV cache size per engine
    state_requests: int | None  # as in RolloutMemory
    lengths: Lengths
    calls: float  # per response; each is followed by a prefill

    @staticmethod
    def of(
        config: RlConfig, shape: ModelShape, hardware: Hardware, rollout: RolloutMemory, lengths: Lengths
    ) -> "Engines":
        r, t = config.rollout, config.train
        count = (r.gpus or hardware.count) // r.engine_tp
        if count < 1:
            raise ConfigError(
                f"{config.source}: rollout.engine_tp = {r.engine_tp} is more than the {hardware.count} devices of "
                f"{hardware.name}. Lower it, or plan for more devices with --hardware"
            )
        return Engines(
            shape=shape, hardware=hardware, tp=r.engine_tp, fp8=r.precision == "fp8",
            count=count, responses=t.prompts_per_step * r.group_size / count, group_size=r.group_size,
            ahead=0.0 if t.mode == "sync" else t.prefetch_batches,
            max_running=r.max_running_requests, kv_tokens=rollout.kv_tokens, state_requests=rollout.state_requests,
            lengths=lengths, calls=calls_of(config, lengths),
        )  # fmt: skip

    @property
    def slots(self) -> tuple[float, str]:
        """The maximum number of concurrent responses per engine, and its limiting factor."""
        limits = {
            self.max_running: "rollout.max_running_requests",
            self.responses * (1 + self.ahead): "the number of responses in flight",
            self.kv_tokens / self.lengths.context: "the size of the KV cache",
        }
        if self.state_requests is not None:
            limits[self.state_requests] = "the memory for states of DeltaNet layers"
        return max(1.0, min(limits)), limits[min(limits)]

    def step_s(self, concurrent: float, context: float) -> float:
        """Seconds per decoding step of ``concurrent`` responses with ``context`` tokens in total.

        Matrix products are bound by reading weights or by compute. Attention runs after them and is
        bound by reading the KV cache; Triton reads an FP8 cache only as fast as a bfloat16 one, in
        tokens per second. DeltaNet layers read and write the state of each response.
        """
        shape, device = self.shape, self.hardware.device
        touched = self._touched_params(concurrent)
        weights = 2 * touched - (touched - shape.head_params if self.fp8 else 0)  # the head stays in bfloat16
        bandwidth = self.tp * device.bandwidth
        products_s = max(
            weights / (bandwidth * calibrated("weights_read")),
            2 * shape.compute_params * concurrent / (self.tp * device.flops * calibrated("products")),
        )
        cached = context * shape.kv_bytes(fp8=False, tp=self.tp)
        states = 2 * concurrent * shape.delta.state_bytes if shape.delta else 0
        cache_s = (cached + states) / (bandwidth * calibrated("cache_read"))
        layer_s = calibrated("decode_layer_s")
        if self.tp > 1:
            sent = 2 * 2 * shape.hidden * concurrent * (self.tp - 1) / self.tp
            layer_s += 2 * (calibrated("all_reduce_s") + sent / (self.hardware.link(self.tp) * calibrated("link")))
        return products_s + cache_s + shape.layers * layer_s + concurrent * calibrated("decode_request_s")

    def _touched_params(self, concurrent: float) -> float:
        """Weights that a decoding step reads, including only experts that get a token."""
        shape = self.shape
        if not shape.experts:
            return shape.compute_params
        read = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** concurrent)
        return shape.compute_params + 3 * shape.hidden * shape.ffn * shape.layers * (read - shape.experts_per_token)

    def prefill_s(self, tokens: float) -> float:
        """Seconds for one engine to prefill ``tokens``."""
        rate = self.tp * self.hardware.device.flops * calibrated("products")
        return 2 * self.shape.compute_params * tokens / rate

    def later_turns_s(self, turns: float, steps: float) -> float:
        """Seconds of prefills after calls. ``turns`` that start in the same step share one."""
        return steps * -math.expm1(-turns / steps) * self.shape.layers * calibrated("prefill_layer_s")

    def start_s(self) -> float:
        """Seconds until all responses of a step are running.

        A group shares the prefill of its prompt. The server accepts requests one at a time.
        """
        prefill_s = self.prefill_s(self.responses * self.lengths.prompt / self.group_size)
        return prefill_s + self.responses * calibrated("start_response_s")

    def wave_s(self, responses: float) -> float:
        """Seconds until the last of an engine's ``responses`` finishes.

        All slots are busy until the last responses have started. Then the number of running
        responses decreases, and the last one has the maximum length (``lengths.limit``).
        """
        lengths = self.lengths
        concurrent = min(self.slots[0], responses)
        steps = max(0.0, responses - concurrent) / concurrent * lengths.mean * lengths.sampled
        seconds = steps * self.step_s(concurrent, concurrent * lengths.context)
        before = 0.0
        for number, length in enumerate([*lengths.quantiles(SAMPLES)[:-1], lengths.limit]):
            running = concurrent * (1 - number / SAMPLES)
            context = running * (lengths.prompt + (before + length) / 2)
            seconds += (length - before) * lengths.sampled * self.step_s(running, context)
            before = length
        steps += lengths.limit * lengths.sampled
        return seconds + self.later_turns_s(responses * self.calls, steps)


def decode(
    shape: ModelShape, hardware: Hardware, config: RlConfig, rollout: RolloutMemory, lengths: Lengths, *,
    training_s: float,
) -> Decoding:  # fmt: skip
    """Estimate decoding of one step's responses. ``training_s``: the step's training time.

    In mode "partial_rollout", a wave generates the responses of several steps.
    """
    engines = Engines.of(config, shape, hardware, rollout, lengths)
    (slots, limit), tokens = engines.slots, engines.count * engines.responses * lengths.mean
    full_s = engines.step_s(slots, slots * lengths.context)
    if config.train.mode == "async":
        seconds, concurrent = async_step(engines, training_s)
        return Decoding(
            seconds=seconds - training_s, longest_turn_s=lengths.limit * full_s, concurrency=concurrent,
            tokens_per_s=tokens / seconds, limit="the trainer" if seconds == training_s else limit,
        )  # fmt: skip
    batches = 1 + engines.ahead
    wave_s = engines.wave_s(engines.responses * batches)
    seconds = wave_s / batches + engines.start_s()
    seconds += engines.calls * calibrated("tool_wait_s") if lengths.tool_s is None else lengths.tool_s
    return Decoding(
        seconds=seconds, longest_turn_s=min(wave_s, lengths.limit * full_s), concurrency=slots,
        tokens_per_s=tokens / seconds, limit="the longest response" if wave_s < 2 * engines.wave_s(1) else limit,
    )  # fmt: skip


def async_step(engines: Engines, training_s: float) -> tuple[float, float]:
    """Seconds per step in mode "async", and the number of concurrent responses per engine.

    A batch is in flight from its first request to the end of its training. A step takes at least
    that time divided by the number of batches in flight. A weight sync pauses the engines, which
    then recompute the KV cache of their running responses.
    """
    lengths, (slots, _) = engines.lengths, engines.slots
    sampled, concurrent, seconds = lengths.mean * lengths.sampled, min(slots, engines.responses), training_s
    for _ in range(20):  # fixed point: the concurrency depends on the seconds, and vice versa
        step_s = engines.step_s(concurrent, concurrent * lengths.context)
        step_s += engines.later_turns_s(concurrent * engines.calls / sampled, 1.0)
        paused_s = sync_s(engines.shape, running=True) + engines.prefill_s(concurrent * lengths.context)
        filled_s = engines.responses * sampled * step_s / slots + paused_s
        batch_s = lengths.limit * lengths.sampled * step_s + paused_s + training_s
        seconds = max(training_s, filled_s, batch_s / (1 + engines.ahead))
        concurrent = (concurrent + min(slots, engines.responses * sampled * step_s / seconds)) / 2
    return seconds, concurrent


def calls_of(config: RlConfig, lengths: Lengths) -> float:
    """Calls per response: as recorded in ``lengths``, else as calibrated; 0 without tools."""
    if not config.rollout.tool:
        return 0.0
    return min(calibrated("calls"), config.rollout.max_turns - 1) if lengths.calls is None else lengths.calls
