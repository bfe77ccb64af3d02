"""Estimates the memory of one device during training and rollouts, by component, in GiB."""

import math
from dataclasses import asdict, dataclass
from math import ceil

from retool_mcore.config import Memory, Parallel
from retool_mcore.config.lora import Lora
from retool_mcore.config.sampling import Rollout
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import GIB, Device
from retool_mcore.platforms.rollout_engines import SGLANG, captured

NO_LORA = Lora()  # full fine-tuning
# config.Memory.adam_states -> bytes per parameter for the master weight and both moments
STATE_BYTES = {"float32": 12, "compact": 10, "bfloat16": 6}
STATES_PER_CACHE = 0.9  # SGLang's default: memory of DeltaNet states / memory of keys and values
STATES_PER_REQUEST = 5  # SGLang's states per running request on CUDA: three, and two of the overlap schedule


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Training memory in GiB of the fullest device.

    It is in the first pipeline stage, which has the most micro-batches in flight.
    """

    weights: float  # including adapters
    fp8_copies: float  # FP8 copies of the layers' weights, plain and transposed, one byte per value each
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    dequantized_matrix: float = 0.0  # the dequantized matrix that a layer currently uses, for an FP8 base

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def idle(self) -> float:
        """GiB that stay on the device during rollouts if memory.offload_idle is false."""
        return self.weights + self.fp8_copies + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    weights: float
    kv_cache: float
    states: float  # of DeltaNet layers
    training: float  # the idle actor, or the part of it that offloading does not free
    beyond: float  # the engine's activations and graphs, if engine_memory_fraction excludes them
    asleep: float  # memory that an idle, colocated engine keeps while the actor trains
    syncing: float  # during weight sync: the actor and the engine's weights, before the KV cache is allocated
    kv_tokens: int  # KV cache size per engine
    state_requests: int | None  # running requests for which an engine has states; None without DeltaNet layers

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.states + self.training + self.beyond


def layer_params_of_rank(shape: ModelShape, parallel: Parallel) -> tuple[float, float]:
    """Layer parameters on one device of the fullest stage: (experts, all others)."""
    layers = ceil(shape.layers / parallel.pp)
    experts = layers * shape.routed_params
    others = layers * shape.layer_params - experts
    return experts / (parallel.expert_tp * parallel.ep), others / parallel.tp


def params_of_rank(shape: ModelShape, parallel: Parallel) -> tuple[float, float]:
    """Parameters on one device of the fullest stage: (experts, all others)."""
    experts, others = layer_params_of_rank(shape, parallel)
    return experts, others + shape.head_params * (1 if shape.tied or parallel.pp > 1 else 2) / parallel.tp


def state_params_of_rank(shape: ModelShape, parallel: Parallel, dp: int) -> float:
    """Parameters whose optimizer state is on one device.

    Expert states are sharded over all ranks of a stage, other states over its replicas.
    """
    experts, others = params_of_rank(shape, parallel)
    return (experts * parallel.expert_tp * parallel.ep / parallel.tp + others) / (dp * parallel.cp)


def groups_of_rank(parallel: Parallel, dp: int) -> int:
    """The number of process groups of a training rank: the world, and one per parallel dimension.

    Groups of one rank do not count.
    """
    sizes = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, dp)
    return sum(size > 1 for size in (math.prod(sizes), *sizes))


def adapters_of_rank(shape: ModelShape, parallel: Parallel, lora: Lora) -> float:
    """Adapter parameters on one device of the fullest stage; 0 without LoRA."""
    return ceil(shape.layers / parallel.pp) * shape.adapter_params(lora.rank, lora.matrices, parallel.tp)


def activation_bytes(
    shape: ModelShape, memory: Memory, tp: int, *, fused: bool = True, fp8: bool = False, lora: bool = False
) -> tuple[float, float]:
    """Activation bytes per token of a layer: (stored for backward, needed during recomputation).

    Values are bfloat16; with ``fp8``, those in ``ModelShape.fp8_values`` take one byte. Sequence
    parallelism splits all of them over ``tp``. Fused attention stores no scores.

    A layer stores the tensors listed in ``ModelShape.kept_bytes``. A layer that is not ``fused``
    also stores the gate's activation and, at norms and residuals, four more hidden states
    (measured: the first two rows of "SFT of a 7B shape on 2 H200" in perf/history.jsonl differ by
    that much). With ``lora``, a layer also stores its norms' outputs, which the adapters read.

    Recomputation "auto" counts as storing everything, because its micro-batches need the most
    memory when nothing is recomputed.
    """
    hidden, ffn = shape.hidden, shape.used_ffn
    unfused = 0 if fused else 2 * (ffn + 4 * hidden)
    unfused += 2 * 2 * hidden if lora and fused else 0
    stored = (shape.kept_bytes - (shape.fp8_values if fp8 else 0) + unfused) / tp
    if memory.recomputes_layers:
        return 2 * hidden / tp, stored
    return stored, 0.0


def train_memory(
    shape: ModelShape, parallel: Parallel, memory: Memory, *, dp: int, micro_batch_tokens: int, fused: bool = True,
    fp8: bool = False, lora: Lora = NO_LORA, group_gib: float = 0.0,
) -> TrainMemory:  # fmt: skip
    """Training memory. ``micro_batch_tokens``: the budget of one rank, not multiplied by cp.

    With ``lora``, only the adapters have gradients and optimizer states. An FP8 base takes one byte
    per layer weight.
    """
    tp, pp = parallel.tp, parallel.pp
    params = sum(params_of_rank(shape, parallel))
    layers = ceil(shape.layers / pp)
    adapters = adapters_of_rank(shape, parallel, lora)
    how: dict[str, bool] = {"fused": fused, "fp8": fp8, "lora": bool(lora.rank)}
    kept, working = activation_bytes(shape, memory, tp, **how)
    if memory.recomputed_layers:
        plain, _ = activation_bytes(shape, Memory(), tp, **how)
        share = min(1.0, memory.recomputed_layers / layers)
        kept = kept * share + plain * (1 - share)
    in_flight = (
        pp * (1 + (pp - 1) / (pp * parallel.vpp)) if parallel.vpp > 1 else pp
    )  # micro-batches in flight in the first stage
    logits_bytes = calibrated("fused_logits_bytes") if memory.fused_cross_entropy else calibrated("logits_bytes")
    own = adapters / (dp * parallel.cp) if lora.rank else state_params_of_rank(shape, parallel, dp)
    states = own * STATE_BYTES[memory.adam_states] * (1 - memory.optimizer_on_cpu)
    return TrainMemory(
        weights=(2 * (params + adapters) - (sum(layer_params_of_rank(shape, parallel)) if lora.in_fp8 else 0)) / GIB,
        fp8_copies=2 * sum(layer_params_of_rank(shape, parallel)) / GIB if fp8 else 0.0,
        gradients=4 * (adapters if lora.rank else params) / GIB,
        optimizer=states / GIB,
        activations=micro_batch_tokens * (kept * layers * in_flight + working) / GIB,
        logits=micro_batch_tokens * shape.vocab / tp * logits_bytes / GIB,
        buffers=calibrated("buffers_gib") + group_gib * groups_of_rank(parallel, dp),
        dequantized_matrix=2 * shape.largest_matrix / tp / GIB if lora.in_fp8 else 0.0,
    )


def captured_by(rollout: Rollout, device: Device) -> int:
    """The largest batch size, in requests, for which an engine captures a CUDA graph."""
    if device.engine_counts_all:  # vLLM
        return captured(0, rollout.engine_tp)
    usual = captured(rollout.max_running_requests, rollout.engine_tp)
    return rollout.engine_args.get(SGLANG.graphs_argument or "", usual)


def rollout_memory(
    shape: ModelShape, train: TrainMemory, memory: Memory, rollout: Rollout, *, device: Device
) -> RolloutMemory:
    """Memory of one device during rollouts. A negative ``kv_cache`` means the engine does not fit.

    The engine's weights, KV cache and states take ``engine_memory_fraction`` of the memory that is
    free next to the actor when the engine starts (SGLang), or of the whole device (vLLM). SGLang
    divides what the weights leave between states of DeltaNet layers and KV cache in a fixed ratio,
    which ``engine_args`` may set. These may also limit the number of cache tokens. With
    ``rollout.gpus``, engines and actor are on different devices.
    """
    weights = shape.engine_bytes(fp8=rollout.precision == "fp8") / rollout.engine_tp / GIB
    stays = train.fp8_copies if memory.offload_idle else train.idle  # verl does not offload Transformer Engine's copies
    training = 0.0 if rollout.gpus else stays + train.buffers
    resident = train.weights + train.fp8_copies if memory.offload_idle else train.idle
    share = rollout.engine_memory_fraction * (device.memory_gib - (0.0 if device.engine_counts_all else training))
    states_gib, state_requests = _states(shape, rollout, share - weights)
    kv_bytes = shape.kv_bytes(fp8=rollout.kv_cache == "fp8", tp=rollout.engine_tp) / rollout.engine_tp
    most_tokens = None if device.engine_counts_all else rollout.engine_args.get(SGLANG.cache_argument or "")
    most_gib = float("inf") if most_tokens is None else most_tokens * kv_bytes / GIB
    cache = min(share - weights - states_gib, most_gib)
    more = max(0, captured_by(rollout, device) - captured(0, rollout.engine_tp))  # in addition to those in engine_gib
    graphs_gib = more * calibrated("graph_request_gib")
    # vLLM has two process groups per engine: its world and tensor parallelism.
    asleep = calibrated("asleep_gib") + graphs_gib + 2 * (rollout.engine_tp > 1) * device.group_gib
    return RolloutMemory(
        weights=weights,
        kv_cache=cache,
        states=states_gib,
        training=training,
        beyond=0.0 if device.engine_counts_all else calibrated("engine_gib") + graphs_gib,
        asleep=0.0 if rollout.gpus else asleep,
        syncing=0.0 if rollout.gpus else resident + train.dequantized_matrix + train.buffers + weights,
        kv_tokens=max(0, round(cache * GIB / kv_bytes)),
        state_requests=state_requests,
    )


def _states(shape: ModelShape, rollout: Rollout, free_gib: float) -> tuple[float, int | None]:
    """GiB of an engine's DeltaNet states on one device, and the number of requests that can run.

    ``free_gib``: what the weights leave of the engine's share.
    """
    if shape.delta is None:
        return 0.0, None
    ratio = rollout.engine_args.get(SGLANG.states_argument or "", STATES_PER_CACHE)
    state_gib = shape.delta.state_bytes / rollout.engine_tp / GIB
    states = math.floor(max(0.0, free_gib) * ratio / (1 + ratio) / state_gib)
    return states * state_gib, states // STATES_PER_REQUEST
