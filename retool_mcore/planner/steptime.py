"""Estimates a step's seconds by phase, with a roofline of FLOPs, communication and memory."""

from dataclasses import dataclass

from retool_mcore.config import Memory, Parallel
from retool_mcore.config.lora import Lora
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import GIB, Hardware
from retool_mcore.planner.memory import (
    NO_LORA,
    STATE_BYTES,
    TrainMemory,
    adapters_of_rank,
    layer_params_of_rank,
    params_of_rank,
    state_params_of_rank,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The tokens of one pass over all devices, and the sum of squared sequence lengths."""

    tokens: float
    squares: float

    @staticmethod
    def of(sequences: float, mean_tokens: float, spread: float) -> "Work":
        """``spread``: the mean square of the lengths divided by the square of their mean."""
        return Work(tokens=sequences * mean_tokens, squares=sequences * mean_tokens**2 * spread)


def pass_s(
    shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, *,
    passes: float, micro_batches: float, fp8: bool, lora: Lora = NO_LORA,
) -> float:  # fmt: skip
    """Seconds for a rank's ``micro_batches``. ``passes``: in units of forward passes.

    Forward plus backward is 3 passes, with full recomputation 4. With small layers, or few tokens
    per expert, kernel launches on the host are the bottleneck. The recurrence of DeltaNet layers is
    assumed to be as efficient as attention; no measurement exists.
    """
    launch_s = calibrated("layer_s") + calibrated("expert_s") * shape.experts / parallel.ep
    launch_s += len(lora.matrices) * calibrated("adapter_s") if lora.rank else 0.0
    device, count = hardware.device, hardware.count
    products = shape.product_flops(passes, lora) * work.tokens / calibrated("products")
    mixing = 2 * shape.attention_layers * shape.heads * shape.head_dim * work.squares
    attention = (mixing + shape.recurrence_flops * work.tokens) * passes / calibrated("attention")
    device_s = (products * (calibrated("fp8") if fp8 else 1.0) + attention) / (count * device.flops)
    permuted = calibrated("permute") * _copied_bytes_per_token(shape) * shape.layers * work.tokens * _traversals(passes)
    device_s += permuted / (count * device.bandwidth * calibrated("memory"))
    device_s += _messages_s(shape, hardware, parallel, work, passes)
    if lora.in_fp8:  # per value: read 1 byte, write 2; then scale in place: read 2, write 2
        moved = micro_batches * (1 + 2 + 2 + 2) * sum(layer_params_of_rank(shape, parallel)) * _traversals(passes)
        device_s += moved / (device.bandwidth * calibrated("dequantize"))
    return max(device_s, micro_batches * shape.layers / parallel.pp * passes * launch_s)


def _messages_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, passes: float) -> float:
    """Seconds of communication for tensor, context and expert parallelism.

    Per layer and forward pass, tensor parallelism does two all-gathers and two reduce-scatters of
    the hidden states, and context parallelism circulates keys and values; in DeltaNet layers, it
    sends all projections to the ranks that have their heads, and the outputs back. Expert
    parallelism sends a copy of a token to each of its experts and back.
    """
    tokens_of_rank = work.tokens / (hardware.count / parallel.model_parallel) / parallel.cp
    tp, cp, ep = parallel.tp, parallel.cp, parallel.ep
    tp_bytes = 4 * 2 * shape.hidden * tokens_of_rank * shape.layers / parallel.pp * (tp - 1) / tp * passes
    cp_values = 2 * shape.kv_heads * shape.head_dim * (cp - 1) * shape.attention_layers
    if shape.delta:
        cp_values += (2 * shape.delta.keys + 3 * shape.delta.values) * (cp - 1) / cp * shape.delta.layers
    cp_bytes = 2 * cp_values * tokens_of_rank / parallel.pp / tp
    ep_bytes = 2 * _copied_bytes_per_token(shape) * tokens_of_rank * shape.layers / parallel.pp * (ep - 1) / ep
    seconds = tp_bytes / hardware.link(tp) + cp_bytes * passes / hardware.link(tp * cp)
    return (seconds + ep_bytes * _traversals(passes) / hardware.link(ep)) / calibrated("link")


def _copied_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of a token's copies in bfloat16, one per selected expert; 0 for a dense model."""
    return 2 * shape.hidden * shape.experts_per_token


def _traversals(passes: float) -> float:
    """The number of traversals of a layer. Backward is one, although it counts as 2 passes."""
    return passes - 1 if passes >= 3 else passes


def optimizer_s(
    shape: ModelShape, hardware: Hardware, parallel: Parallel, memory: Memory, dp: int, *, lora: Lora = NO_LORA
) -> float:
    """Seconds to reduce gradients, update and gather weights, from bytes sent and accessed.

    Optimizer states on the CPU are limited by the host link.
    """
    ranks = dp * parallel.cp
    params = adapters_of_rank(shape, parallel, lora) if lora.rank else sum(params_of_rank(shape, parallel))
    own = params / ranks if lora.rank else state_params_of_rank(shape, parallel, dp)
    messages = 6 * (params - own) / (hardware.link(ranks * parallel.tp) * calibrated("link"))
    states = 2 * (STATE_BYTES[memory.adam_states] + 4) * own
    over_link = states * memory.optimizer_on_cpu / (hardware.device.host_link * calibrated("host"))
    on_device = states * (1 - memory.optimizer_on_cpu) / (hardware.device.bandwidth * calibrated("memory"))
    return messages + on_device + over_link


def pipeline_slowdown(shape: ModelShape, parallel: Parallel, micro_batches: float) -> float:
    """The slowdown factor of pipeline parallelism.

    It includes the pipeline bubble and the output head, which only the last stage has.
    """
    bubble = 1 + (parallel.pp - 1) / (parallel.vpp * max(1.0, micro_batches))
    layers = shape.compute_params - shape.head_params
    return bubble * (layers / parallel.pp + shape.head_params) / ((layers + shape.head_params) / parallel.pp)


def passes_of(memory: Memory, layers_of_stage: int, recomputed: float) -> float:
    """A training pass in units of forward passes.

    ``recomputed``: ``Lengths.recomputed``, for ``memory.recompute = "auto"``.
    """
    if memory.recompute == "auto":
        return 3.0 + recomputed
    if not memory.recomputes_layers:
        return 3.0
    return 3.0 + (min(1.0, memory.recomputed_layers / layers_of_stage) if memory.recomputed_layers else 1.0)


def offload_s(train: TrainMemory, hardware: Hardware) -> float:
    """Seconds per step to offload the idle actor to the host and to load it again.

    The weights move in and out for the old log-probs, the update and the weight sync; the optimizer
    states only for the update.
    """
    return 2 * (3 * train.weights + train.optimizer) * GIB / (hardware.device.host_link * calibrated("host"))


def sync_s(shape: ModelShape, *, running: bool) -> float:
    """Seconds of a weight sync from the actor to the engines; each receives the whole model.

    ``running``: whether it interrupts running responses, which then resume.
    """
    matrices_s = 3 * shape.experts * shape.layers * calibrated("sync_expert_s")
    seconds = shape.layers * calibrated("sync_layer_s") + matrices_s + 2 * shape.params / calibrated("sync_rate")
    return seconds + (calibrated("sync_running_s") if running else 0.0)
