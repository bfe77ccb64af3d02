"""Seconds of one step, phase by phase, from a roofline: matrix products, attention, messages,
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from retool_mcore.config import Memory, Parallel, RlConfig
from retool_mcore.model.activations import layers_to_recompute, token_memory
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import of as calibrated
from retool_mcore.planner.hardware import GIB, Hardware
from retool_mcore.planner.memory import (
    STATE_BYTES,
    RolloutMemory,
    TrainMemory,
    activation_bytes,
    params_of_rank,
    state_params_of_rank,
)

SAMPLES = 64  # lengths that stand for all


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens of one pass over all devices, and the sum of the squares of the sequences' lengths."""

    tokens: float
    squares: float

    @staticmethod
    def of(sequences: float, mean_tokens: float) -> Work:
        return Work(tokens=sequences * mean_tokens, squares=sequences * mean_tokens**2 * calibrated("spread"))


def pass_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, *, passes: float) -> float:
    """Seconds of ``passes`` forward-equivalents (forward 1, forward and backward 3, with full
    recomputation 4).
    """
    devices, flops = hardware.count, hardware.device.flops
    products = 2 * shape.compute_params * work.tokens * passes / (devices * flops * calibrated("gemm"))
    attention = 2 * shape.layers * shape.heads * shape.head_dim * work.squares * passes
    attention_s = attention / (devices * flops * calibrated("attention"))
    kept, _ = activation_bytes(shape, Memory(), 1, fused=hardware.device.fused)
    moved = kept * shape.layers * work.tokens * calibrated("elementwise") * passes / 3
    elementwise_s = moved / (devices * hardware.device.bandwidth * calibrated("memory"))
    busy_s = products + attention_s + elementwise_s
    ring = calibrated("ring") if parallel.cp > 1 else 0.0
    return busy_s * (1 + calibrated("gaps") + ring) + _messages_s(shape, hardware, parallel, work, passes)


def _messages_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, passes: float) -> float:
    """Tensor parallelism gathers and scatters a layer's input twice a forward pass; context
    parallelism its keys.
    """
    tokens_of_rank = work.tokens / (hardware.count / parallel.model_parallel) / parallel.cp
    tp, cp = parallel.tp, parallel.cp
    tp_bytes = 4 * 2 * shape.hidden * tokens_of_rank * shape.layers / parallel.pp * (tp - 1) / tp * passes
    cp_bytes = 2 * 2 * shape.kv_heads * shape.head_dim * tokens_of_rank * (cp - 1) * shape.layers / parallel.pp / tp
    rate = calibrated("link")
    return tp_bytes / (hardware.link(tp) * rate) + cp_bytes * passes / (hardware.link(tp * cp) * rate)


def optimizer_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, memory: Memory, dp: int) -> float:
    """Reduce gradients, step, gather weights: bytes over links and through memory (or the host's)."""
    params = sum(params_of_rank(shape, parallel))
    ranks = dp * parallel.cp
    own = state_params_of_rank(shape, parallel, dp)
    messages = 6 * (params - own) / (hardware.link(ranks * parallel.tp) * calibrated("link"))
    states = 2 * (STATE_BYTES[memory.adam_states] + 4) * own
    host = states * memory.optimizer_on_cpu / calibrated("host_rate")
    return messages + states * (1 - memory.optimizer_on_cpu) / (hardware.device.bandwidth * calibrated("memory")) + host


def stretch(shape: ModelShape, parallel: Parallel, micro_batches: float) -> float:
    """How much longer a pass takes for a pipeline: its filling and draining, and its last stage,
    which has the head.
    """
    bubble = 1 + (parallel.pp - 1) / (parallel.vpp * max(1.0, micro_batches))
    layers = shape.compute_params - shape.head_params
    return bubble * (layers / parallel.pp + shape.head_params) / ((layers + shape.head_params) / parallel.pp)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of sequences: evenly spread about their mean, as far as the longest or down to nothing,
    whichever is nearer.
    """

    mean: float
    longest: float

    def recomputed(self, shape: ModelShape, parallel: Parallel, memory: Memory, micro_batch_tokens: int) -> float:
        """Share of all layers' forward work that ``memory.recompute = "auto"`` does twice.

        A sequence above the budget of a micro-batch is alone in one; shorter ones are packed to it
        and keep all.
        """
        high = min(self.longest, 2 * self.mean)
        low, layers = 2 * self.mean - high, ceil(shape.layers / parallel.pp)
        rest, input_share = token_memory(shape, fused_cross_entropy=memory.fused_cross_entropy)
        lengths = [low + (high - low) * (number + 0.5) / SAMPLES for number in range(SAMPLES)]
        twice = 0.0
        for length in lengths:
            tokens = ceil(length / parallel.cp)
            wanted = layers_to_recompute(tokens, micro_batch_tokens, layers, rest=rest, input_share=input_share)
            twice += length * min(wanted, layers) / layers
        return twice / sum(lengths)


def passes_of(memory: Memory, layers_of_stage: int, recomputed: float) -> float:
    """Forward-equivalents of one training pass; ``recomputed``: see Lengths, for "auto"."""
    if memory.recompute == "auto":
        return 3.0 + recomputed
    if memory.recompute != "full":
        return 3.0
    return 3.0 + (min(1.0, memory.recompute_layers / layers_of_stage) if memory.recompute_layers else 1.0)


def offload_s(train: TrainMemory) -> float:
    """Weights out and in at old log-probabilities, update and weight sync; the optimizer's states
    at the update.
    """
    return 2 * (3 * train.weights + train.optimizer) * GIB / calibrated("host_rate")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    seconds: float
    concurrency: float  # responses at the same time in one engine
    tokens_per_s: float  # of all engines
    limit: str  # what it waits for


def decode(
    shape: ModelShape, hardware: Hardware, config: RlConfig, rollout: RolloutMemory, mean_response: float
) -> Decoding:
    """All responses of one step. Never faster than the longest response by itself."""
    tp = config.rollout.engine_tp
    engines = hardware.count // tp
    responses = config.train.prompts_per_step * config.rollout.group_size / engines
    context = config.data.max_prompt_tokens / 2 + mean_response / 2
    fits = rollout.kv_tokens / (config.data.max_prompt_tokens / 2 + mean_response)
    at_once = max(1.0, min(config.rollout.max_running_requests, responses, fits))
    step_s = _decode_step_s(shape, hardware, tp, at_once, context)
    steady_s = responses * mean_response / at_once * step_s
    longest_s = config.rollout.max_response_tokens * _decode_step_s(shape, hardware, tp, 1, context)
    prefill = 2 * shape.compute_params * responses * config.data.max_prompt_tokens / 2
    prefill_s = (
        prefill / (tp * hardware.device.flops * calibrated("gemm")) / config.rollout.group_size
    )  # the prefix is shared
    tools_s = calibrated("calls") * calibrated("tool_wait_s") if config.rollout.tool else 0.0
    seconds = max(steady_s, longest_s) + prefill_s + tools_s
    limits = {
        config.rollout.max_running_requests: "rollout.max_running_requests",
        responses: "responses",
        fits: "cache",
    }
    limit = "the longest response" if longest_s > steady_s else limits[min(limits)]
    return Decoding(
        seconds=seconds, concurrency=at_once, tokens_per_s=engines * responses * mean_response / seconds, limit=limit
    )


def _decode_step_s(shape: ModelShape, hardware: Hardware, tp: int, at_once: float, context: float) -> float:
    moved = (2 * _touched_params(shape, at_once) + at_once * context * shape.kv_bytes) / tp
    memory_s = moved / (hardware.device.bandwidth * calibrated("memory"))
    compute_s = 2 * shape.compute_params * at_once / (tp * hardware.device.flops * calibrated("gemm"))
    sums_s = 0.0
    if tp > 1:
        sent = 2 * 2 * shape.hidden * at_once * (tp - 1) / tp
        sums_s = 2 * (calibrated("all_reduce_s") + sent / (hardware.link(tp) * calibrated("link")))
    return max(memory_s, compute_s) + shape.layers * (calibrated("decode_layer_s") + sums_s)


def _touched_params(shape: ModelShape, at_once: float) -> float:
    """Weights read for one token each of ``at_once`` sequences; an expert is read if one of them is
    routed to it.
    """
    if not shape.experts:
        return shape.compute_params
    experts = 3 * shape.hidden * shape.ffn * shape.layers
    read = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** at_once)
    return shape.compute_params + experts * (read - shape.experts_per_token)


def sync_s(shape: ModelShape) -> float:
    """The actor's weights into the engines; each gathers the whole model."""
    return calibrated("sync_s") + 2 * shape.params / calibrated("sync_rate")


def total(phases: Mapping[str, float]) -> float:
    return sum(phases.values())
