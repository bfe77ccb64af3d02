"""Seconds of one step by phase, from a roofline of arithmetic, messages and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

from retool_mcore.config import Memory, Parallel
from retool_mcore.config.lora import Lora
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import GIB, Hardware
from retool_mcore.planner.memory import (
    STATE_BYTES,
    WHOLE,
    TrainMemory,
    activation_bytes,
    adapters_of_rank,
    layer_params_of_rank,
    params_of_rank,
    state_params_of_rank,
)

DENSE_TENSORS = 7  # of Megatron's layer: two norms, four matrices and a bias


@dataclass(frozen=True, kw_only=True)
class Work:
    """The tokens of one pass over all devices, and the sum of the squared sequence lengths."""

    tokens: float
    squares: float

    @staticmethod
    def of(sequences: float, mean_tokens: float, spread: float) -> Work:
        """``spread``: the mean square of the lengths over the square of their mean."""
        return Work(tokens=sequences * mean_tokens, squares=sequences * mean_tokens**2 * spread)


def pass_s(
    shape: ModelShape,
    hardware: Hardware,
    parallel: Parallel,
    work: Work,
    *,
    passes: float,
    micro_batches: int,
    fp8: bool,
    lora: Lora = WHOLE,
    host: float = 1.0,
) -> float:
    """Seconds of ``passes``, counted in forward passes, over all of a rank's ``micro_batches``.

    Forward and backward are 3, with full recomputation 4. ``fp8``: with model.fp8. Where layers are
    small, or experts get few tokens each, the host cannot launch as fast as the device works; it
    takes ``host`` times its usual time.
    """
    layers = micro_batches * shape.layers / parallel.pp * passes
    launch_s = host * layers * _layer_launch_s(shape, parallel, fp8=fp8, lora=lora)
    device_s = _device_s(shape, hardware, parallel, work, passes=passes, fp8=fp8, lora=lora)
    if lora.in_fp8:
        device_s += micro_batches * _whole_s(shape, hardware, parallel, passes)
    return max(device_s, launch_s)


def _layer_launch_s(shape: ModelShape, parallel: Parallel, *, fp8: bool, lora: Lora) -> float:
    """Seconds of the host to launch a layer's forward pass.

    Adapters are three or four small kernels more for each matrix that has one. What FP8 adds to a
    layer without experts is not known: no recorded row waits for it.
    """
    seconds = calibrated("dense_layer_s")
    if shape.experts:
        seconds = calibrated("expert_layer_s") + calibrated("expert_launch_s") * shape.experts / parallel.ep
        seconds *= calibrated("fp8_launches") if fp8 else 1.0
    return seconds + (len(lora.matrices) * calibrated("adapter_launch_s") if lora.rank else 0.0)


def _whole_s(shape: ModelShape, hardware: Hardware, parallel: Parallel, passes: float) -> float:
    """Seconds to make a rank's weights whole for a micro-batch, in each direction and again where
    recomputed.

    A byte is read and two are written; then a row's scale multiplies those in their place.
    """
    moved = (1 + 2 + 2 + 2) * sum(layer_params_of_rank(shape, parallel)) * _directions(passes)
    return moved / (hardware.device.bandwidth * calibrated("whole"))


def _device_s(
    shape: ModelShape, hardware: Hardware, parallel: Parallel, work: Work, *, passes: float, fp8: bool, lora: Lora
) -> float:
    devices, flops = hardware.count, hardware.device.flops
    products = shape.product_flops(passes, lora) * work.tokens / (devices * flops * calibrated("gemm"))
    products *= calibrated("fp8") if fp8 else 1.0
    attention = 2 * shape.layers * shape.heads * shape.head_dim * work.squares * passes
    attention_s = attention / (devices * flops * calibrated("attention"))
    kept, _ = activation_bytes(shape, Memory(), 1, fused=hardware.device.fused)
    moved = kept * shape.layers * work.tokens * calibrated("elementwise") * passes / 3
    moved += calibrated("permute") * _copies_of_token(shape) * shape.layers * work.tokens * _directions(passes)
    elementwise_s = moved / (devices * hardware.device.bandwidth * calibrated("memory"))
    beside_s = _adapters_move(shape, passes, lora) * work.tokens / (devices * hardware.device.bandwidth)
    busy_s = products + attention_s + elementwise_s + beside_s
    ring = calibrated("ring") if parallel.cp > 1 else 0.0
    return busy_s * (1 + calibrated("gaps") + ring) + _messages_s(shape, hardware, parallel, work, passes)


def _adapters_move(shape: ModelShape, passes: float, lora: Lora) -> float:
    """Bytes of a token that adapters move through memory in ``passes``; counted, at its full rate.

    Forward, those of a linear read its input, write their products, copy several into one, and add
    that to the linear's output. Backward they read that output's gradient twice and the input once,
    and add to the input's gradient what they wrote. What has the rank for a width is small.
    """
    if not lora.rank:
        return 0.0
    attended, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    forward = backward = 0
    for held, width, out in (
        (("q_proj", "k_proj", "v_proj"), shape.hidden, attended + 2 * kv),
        (("o_proj",), attended, shape.hidden),
        (("gate_proj", "up_proj"), shape.hidden, 2 * shape.ffn),
        (("down_proj",), shape.ffn, shape.hidden),
    ):
        if not set(held).isdisjoint(lora.matrices):
            forward += width + (1 + (2 if len(held) > 1 else 0) + 3) * out
            backward += (1 + 1 + 3) * width + 2 * out
    times = passes - 2 if passes >= 3 else passes
    return 2.0 * shape.layers * (forward * times + (backward if passes >= 3 else 0))


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
    ep_s = ep_bytes * _directions(passes) / (hardware.link(ep) * rate)
    return tp_bytes / (hardware.link(tp) * rate) + cp_bytes * passes / (hardware.link(tp * cp) * rate) + ep_s


def _copies_of_token(shape: ModelShape) -> int:
    """Bytes of a token's copies, one for each of its experts, in bfloat16; 0 without experts."""
    return 2 * shape.hidden * shape.experts_per_token


def _directions(passes: float) -> float:
    """How often a layer is gone through: once in backward, which counts twice."""
    return passes - 1 if passes >= 3 else passes


def optimizer_s(
    shape: ModelShape,
    hardware: Hardware,
    parallel: Parallel,
    memory: Memory,
    dp: int,
    *,
    lora: Lora = WHOLE,
    host: float = 1.0,
) -> float:
    """Seconds to reduce gradients, step and gather weights: bytes over links and through memory.

    States on the host count at the host's rate. Where tensors are small, as adapters are, the host
    cannot launch a step of each as fast as the device works; it takes ``host`` times its usual
    time.
    """
    params = sum(params_of_rank(shape, parallel))
    ranks = dp * parallel.cp
    own = state_params_of_rank(shape, parallel, dp)
    if lora.rank:
        params = adapters_of_rank(shape, parallel, lora)
        own = params / ranks
    messages = 6 * (params - own) / (hardware.link(ranks * parallel.tp) * calibrated("link"))
    states = 2 * (STATE_BYTES[memory.adam_states] + 4) * own
    over_link = states * memory.optimizer_on_cpu / (hardware.device.host_link * calibrated("host"))
    on_device = states * (1 - memory.optimizer_on_cpu) / (hardware.device.bandwidth * calibrated("memory"))
    of_layer = 2 * len(lora.matrices) if lora.rank else DENSE_TENSORS
    launches = shape.layers / parallel.pp * of_layer / ranks * calibrated("optimizer_tensor_s")  # each steps its own
    return messages + max(on_device, host * launches) + over_link


def stretch(shape: ModelShape, parallel: Parallel, micro_batches: float) -> float:
    """How much longer a pass takes in a pipeline.

    The pipeline fills and drains, and its last stage also has the head.
    """
    bubble = 1 + (parallel.pp - 1) / (parallel.vpp * max(1.0, micro_batches))
    layers = shape.compute_params - shape.head_params
    return bubble * (layers / parallel.pp + shape.head_params) / ((layers + shape.head_params) / parallel.pp)


def passes_of(memory: Memory, layers_of_stage: int, recomputed: float) -> float:
    """A training pass in forward passes; ``recomputed`` is ``Lengths.recomputed``, for "auto"."""
    if memory.recompute == "auto":
        return 3.0 + recomputed
    if not memory.recomputes_layers:
        return 3.0
    return 3.0 + (min(1.0, memory.recomputed_layers / layers_of_stage) if memory.recomputed_layers else 1.0)


def offload_s(train: TrainMemory, hardware: Hardware) -> float:
    """Seconds to move the idle actor's state between device and host.

    The weights go in and out for the old log-probabilities, the update and the weight sync, the
    optimizer's states for the update.
    """
    return 2 * (3 * train.weights + train.optimizer) * GIB / (hardware.device.host_link * calibrated("host"))


def sync_s(shape: ModelShape, hardware: Hardware, *, running: bool, lora: Lora = WHOLE) -> float:
    """Seconds to send the actor's weights into the engines; each gathers the whole model.

    ``running``: responses are stopped for it, and go on. Adapters are merged on the way: a matrix
    is written as float32, added to as such and rounded again.
    """
    seconds = sync_host_s(shape, lora) + 2 * shape.params / calibrated("sync_rate")
    if lora.rank:
        moved = (2 + 4 + 4 + 4 + 4 + 2) * shape.layers * shape.layer_params
        seconds += moved / (hardware.device.bandwidth * calibrated("memory"))
    return seconds + (calibrated("sync_running_s") if running else 0.0)


def sync_host_s(shape: ModelShape, lora: Lora = WHOLE) -> float:
    """Of a weight sync what the host does. Experts are sent matrix by matrix."""
    experts = 3 * shape.experts * shape.layers
    seconds = calibrated("sync_s") + shape.layers * calibrated("sync_layer_s") + experts * calibrated("sync_expert_s")
    merged = shape.layers * len(lora.matrices) if lora.rank else 0
    return seconds + merged * calibrated("merge_s")


def driver_s(responses: float, replayed: float, recorded: float) -> tuple[float, float]:
    """Seconds of the driver alone, while devices wait: in a step, and for metrics between two.

    ``replayed``: experts of all tokens, for the actor to take again. ``recorded``: tokens of the
    trajectories that are written.
    """
    inside = calibrated("advantage_s") + responses * calibrated("advantage_response_s")
    inside += replayed * calibrated("replay_value_s")
    return inside, calibrated("metrics_s") + recorded * calibrated("metrics_token_s")
