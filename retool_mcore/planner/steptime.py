"""Seconds of one step by phase, from a roofline of arithmetic, messages and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from retool_mcore.config import Memory, Parallel, RlConfig
from retool_mcore.model.activations import layers_to_recompute, token_memory
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import GIB, Hardware
from retool_mcore.planner.memory import (
    STATE_BYTES,
    RolloutMemory,
    TrainMemory,
    activation_bytes,
    params_of_rank,
    state_params_of_rank,
)

SAMPLES = 64  # lengths that stand for all lengths of a run


@dataclass(frozen=True, kw_only=True)
class Work:
    """The tokens of one pass over all devices, and the sum of the squared sequence lengths."""

    tokens: float
    squares: float

    @staticmethod
    def of(sequences: float, mean_tokens: float) -> Work:
        return Work(tokens=sequences * mean_tokens, squares=sequences * mean_tokens**2 * calibrated("spread"))


def pass_s(
    shape: ModelShape,
    hardware: Hardware,
    parallel: Parallel,
    work: Work,
    *,
    passes: float,
    micro_batches: int,
    fp8: bool,
) -> float:
    """Seconds of ``passes``, counted in forward passes, over all of a rank's ``micro_batches``.

    Forward and backward are 3, with full recomputation 4. ``fp8``: with model.fp8. Where experts
    get few tokens each, the host cannot launch their products as fast as the device works.
    """
    layer_s = calibrated("expert_layer_s") + calibrated("expert_launch_s") * shape.experts / parallel.ep
    launch_s = micro_batches * shape.layers / parallel.pp * passes * (layer_s if shape.experts else 0.0)
    launch_s *= calibrated("fp8_launches") if fp8 else 1.0
    return max(_device_s(shape, hardware, parallel, work, passes=passes, fp8=fp8), launch_s)


def _device_s(
    shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, *, passes: float, fp8: bool
) -> float:
    devices, flops = hardware.count, hardware.device.flops
    products = 2 * shape.compute_params * work.tokens * passes / (devices * flops * calibrated("gemm"))
    products *= calibrated("fp8") if fp8 else 1.0
    attention = 2 * shape.layers * shape.heads * shape.head_dim * work.squares * passes
    attention_s = attention / (devices * flops * calibrated("attention"))
    kept, _ = activation_bytes(shape, Memory(), 1, fused=hardware.device.fused)
    moved = kept * shape.layers * work.tokens * calibrated("elementwise") * passes / 3
    moved += calibrated("permute") * _copies_of_token(shape) * shape.layers * work.tokens * _exchanges(passes)
    elementwise_s = moved / (devices * hardware.device.bandwidth * calibrated("memory"))
    busy_s = products + attention_s + elementwise_s
    ring = calibrated("ring") if parallel.cp > 1 else 0.0
    return busy_s * (1 + calibrated("gaps") + ring) + _messages_s(shape, hardware, parallel, work, passes)


def _messages_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, passes: float) -> float:
    """Seconds of the messages of tensor, context and expert parallelism.

    Per forward pass, tensor parallelism gathers and scatters a layer's input twice, and context
    parallelism sends keys and values around. Expert parallelism sends a copy of a token to each of
    its experts, and back.
    """
    tokens_of_rank = work.tokens / (hardware.count / parallel.model_parallel) / parallel.cp
    tp, cp = parallel.tp, parallel.cp
    tp_bytes = 4 * 2 * shape.hidden * tokens_of_rank * shape.layers / parallel.pp * (tp - 1) / tp * passes
    cp_bytes = 2 * 2 * shape.kv_heads * shape.head_dim * tokens_of_rank * (cp - 1) * shape.layers / parallel.pp / tp
    ep = parallel.ep
    ep_bytes = 2 * _copies_of_token(shape) * tokens_of_rank * shape.layers / parallel.pp * (ep - 1) / ep
    rate = calibrated("link")
    ep_s = ep_bytes * _exchanges(passes) / (hardware.link(ep) * rate)
    return tp_bytes / (hardware.link(tp) * rate) + cp_bytes * passes / (hardware.link(tp * cp) * rate) + ep_s


def _copies_of_token(shape: ModelShape) -> int:
    """Bytes of a token's copies, one for each of its experts, in bfloat16; 0 without experts."""
    return 2 * shape.hidden * shape.experts_per_token


def _exchanges(passes: float) -> float:
    """How often tokens go to their experts and back: once in backward, which counts twice."""
    return passes - 1 if passes >= 3 else passes


def optimizer_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, memory: Memory, dp: int) -> float:
    """Seconds to reduce gradients, step and gather weights: bytes over links and through memory.

    States on the host count at the host's rate.
    """
    params = sum(params_of_rank(shape, parallel))
    ranks = dp * parallel.cp
    own = state_params_of_rank(shape, parallel, dp)
    messages = 6 * (params - own) / (hardware.link(ranks * parallel.tp) * calibrated("link"))
    states = 2 * (STATE_BYTES[memory.adam_states] + 4) * own
    host = states * memory.optimizer_on_cpu / calibrated("host_rate")
    return messages + states * (1 - memory.optimizer_on_cpu) / (hardware.device.bandwidth * calibrated("memory")) + host


def stretch(shape: ModelShape, parallel: Parallel, micro_batches: float) -> float:
    """How much longer a pass takes in a pipeline.

    The pipeline fills and drains, and its last stage also has the head.
    """
    bubble = 1 + (parallel.pp - 1) / (parallel.vpp * max(1.0, micro_batches))
    layers = shape.compute_params - shape.head_params
    return bubble * (layers / parallel.pp + shape.head_params) / ((layers + shape.head_params) / parallel.pp)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Sequence lengths, spread evenly around their mean.

    They reach up to the longest or down to nothing, whichever is nearer to the mean.
    """

    mean: float
    longest: float

    def recomputed(self, shape: ModelShape, parallel: Parallel, memory: Memory, micro_batch_tokens: int) -> float:
        """Share of all layers' forward work that ``memory.recompute = "auto"`` does twice.

        A sequence above the budget of a micro-batch has one to itself. Shorter sequences are packed
        up to the budget and keep all activations.
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
    """A training pass in forward passes; ``recomputed`` is ``Lengths.recomputed``, for "auto"."""
    if memory.recompute == "auto":
        return 3.0 + recomputed
    if memory.recompute != "full":
        return 3.0
    return 3.0 + (min(1.0, memory.recompute_layers / layers_of_stage) if memory.recompute_layers else 1.0)


def offload_s(train: TrainMemory) -> float:
    """Seconds to move the idle actor's state between device and host.

    The weights go in and out for the old log-probabilities, the update and the weight sync, the
    optimizer's states for the update.
    """
    return 2 * (3 * train.weights + train.optimizer) * GIB / calibrated("host_rate")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    seconds: float
    longest_turn_s: float  # a turn of the longest response, among as many as an engine samples at once
    concurrency: float  # concurrent responses in one engine
    tokens_per_s: float  # of all engines
    limit: str  # what decoding waits for


def decode(
    shape: ModelShape, hardware: Hardware, config: RlConfig, rollout: RolloutMemory, mean_response: float
) -> Decoding:
    """Decode all responses of one step; never faster than the longest response alone."""
    tp = config.rollout.engine_tp
    engines = hardware.count // tp
    responses = config.train.prompts_per_step * config.rollout.group_size / engines
    context = config.data.max_prompt_tokens / 2 + mean_response / 2
    fits = rollout.kv_tokens / (config.data.max_prompt_tokens / 2 + mean_response)
    at_once = max(1.0, min(config.rollout.max_running_requests, responses, fits))
    fp8 = config.rollout.precision == "fp8"
    step_s = _decode_step_s(shape, hardware, tp, at_once, context, fp8=fp8)
    steady_s = responses * mean_response / at_once * step_s
    longest_s = config.rollout.max_response_tokens * _decode_step_s(shape, hardware, tp, 1, context, fp8=fp8)
    prefill = 2 * shape.compute_params * responses * config.data.max_prompt_tokens / 2
    prefill_s = (
        prefill / (tp * hardware.device.flops * calibrated("gemm")) / config.rollout.group_size
    )  # a group shares its prefix
    tools_s = calibrated("calls") * calibrated("tool_wait_s") if config.rollout.tool else 0.0
    seconds = max(steady_s, longest_s) + prefill_s + tools_s
    limits = {
        config.rollout.max_running_requests: "rollout.max_running_requests",
        responses: "responses",
        fits: "cache",
    }
    limit = "the longest response" if longest_s > steady_s else limits[min(limits)]
    return Decoding(
        seconds=seconds, longest_turn_s=config.rollout.max_response_tokens * step_s, concurrency=at_once,
        tokens_per_s=engines * responses * mean_response / seconds, limit=limit,
    )  # fmt: skip


def _decode_step_s(
    shape: ModelShape, hardware: Hardware, tp: int, at_once: float, context: float, *, fp8: bool
) -> float:
    touched = _touched_params(shape, at_once)
    weights = 2 * touched - (touched - shape.head_params if fp8 else 0)  # the head's stay as they are
    moved = (weights + at_once * context * shape.kv_bytes) / tp
    memory_s = moved / (hardware.device.bandwidth * calibrated("memory"))
    compute_s = 2 * shape.compute_params * at_once / (tp * hardware.device.flops * calibrated("gemm"))
    sums_s = 0.0
    if tp > 1:
        sent = 2 * 2 * shape.hidden * at_once * (tp - 1) / tp
        sums_s = 2 * (calibrated("all_reduce_s") + sent / (hardware.link(tp) * calibrated("link")))
    return max(memory_s, compute_s) + shape.layers * (calibrated("decode_layer_s") + sums_s)


def _touched_params(shape: ModelShape, at_once: float) -> float:
    """Weights read to decode one token of each of ``at_once`` sequences.

    An expert is read if at least one of the tokens is routed to it.
    """
    if not shape.experts:
        return shape.compute_params
    experts = 3 * shape.hidden * shape.ffn * shape.layers
    read = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** at_once)
    return shape.compute_params + experts * (read - shape.experts_per_token)


def sync_s(shape: ModelShape) -> float:
    """Seconds to send the actor's weights into the engines; each gathers the whole model.

    Experts are sent matrix by matrix.
    """
    matrices = 3 * shape.experts * shape.layers
    return calibrated("sync_s") + 2 * shape.params / calibrated("sync_rate") + matrices * calibrated("sync_expert_s")
