"""Memory of one device during training and during rollouts, part by part, in GiB."""

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

WHOLE = Lora()  # all weights are trained
STATE_BYTES = {"float32": 12, "compact": 10, "bfloat16": 6}  # config.Memory.adam_states: master weight and moments


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Memory of a pipeline's fullest device: in the first stage, with the most micro-batches."""

    weights: float  # adapters among them
    fp8_copies: float  # of the layers' weights, as they are and transposed, a byte each
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    whole_matrix: float = 0.0  # the one of a base in FP8 that a layer computes with

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def idle(self) -> float:
        """What stays on the device during rollouts when memory.offload_idle is false."""
        return self.weights + self.fp8_copies + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    weights: float
    kv_cache: float
    training: float  # the idle actor's; if it is offloaded, what offloading does not free
    beyond: float  # the engine's activations and graphs, if they are outside its share
    asleep: float  # what the engine keeps while the actor trains beside it
    syncing: float  # while weights are sent: the actor and the engine's weights, whose cache comes after
    kv_tokens: int  # of one engine

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.training + self.beyond


def layer_params_of_rank(shape: ModelShape, parallel: Parallel) -> tuple[float, float]:
    """Parameters of layers on one device of the fullest stage: those of experts and all others."""
    layers = ceil(shape.layers / parallel.pp)
    experts = layers * (shape.layer_params - shape.attention_params) if shape.experts else 0
    others = layers * shape.layer_params - experts
    return experts / (parallel.expert_tp * parallel.ep), others / parallel.tp


def params_of_rank(shape: ModelShape, parallel: Parallel) -> tuple[float, float]:
    """Parameters on one device of the fullest stage: those of experts and all others."""
    experts, others = layer_params_of_rank(shape, parallel)
    return experts, others + shape.head_params * (1 if shape.tied or parallel.pp > 1 else 2) / parallel.tp


def state_params_of_rank(shape: ModelShape, parallel: Parallel, dp: int) -> float:
    """Parameters whose optimizer state is on one device.

    Those of the experts are spread over all ranks of a stage, those of the rest over its replicas.
    """
    experts, others = params_of_rank(shape, parallel)
    return (experts * parallel.expert_tp * parallel.ep / parallel.tp + others) / (dp * parallel.cp)


def groups_of_rank(parallel: Parallel, dp: int) -> int:
    """The groups in which a rank of the training communicates: all ranks, and one for each way to
    split.
    """
    sizes = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, dp)
    return sum(size > 1 for size in (math.prod(sizes), *sizes))


def adapters_of_rank(shape: ModelShape, parallel: Parallel, lora: Lora) -> float:
    """Parameters of adapters on one device of the fullest stage; 0 without."""
    return ceil(shape.layers / parallel.pp) * shape.adapter_params(lora.rank, lora.matrices, parallel.tp)


def activation_bytes(
    shape: ModelShape, memory: Memory, tp: int, *, fused: bool = True, fp8: bool = False, lora: bool = False
) -> tuple[float, float]:
    """Bytes per token that a layer keeps for its backward pass, and that it needs to recompute.

    The bytes are for bfloat16, with ``fp8`` one for each value that ``ModelShape.fp8_values``
    counts. Sequence parallelism splits all of them over ``tp``, and fused attention keeps no
    scores. A layer keeps what ``ModelShape.kept_bytes`` lists. A layer that is not ``fused`` also
    keeps the gate's activation and, at norms and residuals, four more hidden states (measured:
    the first two rows of "SFT of a 7B shape on 2 H200" in perf/history.jsonl differ by that much).
    "auto" counts as keeping everything, because its micro-batches are fullest when nothing is
    recomputed. With ``lora`` a layer also keeps its norms' outputs, which adapters read.
    """
    hidden, ffn = shape.hidden, shape.ffn * (shape.experts_per_token or 1)
    unfused = 0 if fused else 2 * (ffn + 4 * hidden)
    unfused += 2 * 2 * hidden if lora and fused else 0
    whole = (shape.kept_bytes - (shape.fp8_values if fp8 else 0) + unfused) / tp
    if memory.recomputes_layers:
        return 2 * hidden / tp, whole
    if memory.recompute == "selective" and not fused:  # recomputes the norms' outputs, which fused layers do not keep
        return whole - 2 * 2 * hidden / tp, 2 * 2 * hidden / tp
    return whole, 0.0


def train_memory(
    shape: ModelShape, parallel: Parallel, memory: Memory, *, dp: int, micro_batch_tokens: int, fused: bool = True,
    fp8: bool = False, lora: Lora = WHOLE, group_gib: float = 0.0,
) -> TrainMemory:  # fmt: skip
    """Memory of training; ``micro_batch_tokens`` is the budget of one rank, not times cp.

    With ``lora`` gradients and the optimizer's states are the adapters' alone. A base in FP8 has a
    byte for each of the layers' weights.
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
    )  # micro-batches in the first stage
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
        whole_matrix=2 * shape.largest_matrix / tp / GIB if lora.in_fp8 else 0.0,
    )


def captured_by(rollout: Rollout, device: Device) -> int:
    """Requests of the largest decoding step that an engine has in a graph."""
    if device.engine_counts_all:  # no SGLang
        return captured(0, rollout.engine_tp)
    usual = captured(rollout.max_running_requests, rollout.engine_tp)
    return rollout.engine_args.get(SGLANG.graphs_argument or "", usual)


def rollout_memory(
    shape: ModelShape, train: TrainMemory, memory: Memory, rollout: Rollout, *, device: Device
) -> RolloutMemory:
    """Memory of one device during rollouts. When the cache is below 0, the engine does not fit.

    The engine's weights and cache take ``engine_memory_fraction`` of what is free beside the actor
    when the engine starts (SGLang), or of the whole device (vLLM); ``engine_args`` may hold the
    cache's tokens to a number. With ``rollout.gpus`` there is no actor beside it.
    """
    weights = shape.engine_bytes(fp8=rollout.precision == "fp8") / rollout.engine_tp / GIB
    stays = train.fp8_copies if memory.offload_idle else train.idle  # verl does not know of Transformer Engine's copies
    training = 0.0 if rollout.gpus else stays + train.buffers
    beside = train.weights + train.fp8_copies if memory.offload_idle else train.idle
    share = rollout.engine_memory_fraction * (device.memory_gib - (0.0 if device.engine_counts_all else training))
    kv_bytes = shape.kv_bytes(fp8=rollout.kv_cache == "fp8") / rollout.engine_tp
    most_tokens = None if device.engine_counts_all else rollout.engine_args.get(SGLANG.cache_argument or "")
    cache = min(share - weights, float("inf") if most_tokens is None else most_tokens * kv_bytes / GIB)
    more = max(0, captured_by(rollout, device) - captured(0, rollout.engine_tp))  # than in engine_gib
    graphs_gib = more * calibrated("graph_request_gib")
    # vLLM's groups of an engine's ranks: all of them, and those that split its layers
    asleep = calibrated("asleep_gib") + graphs_gib + 2 * (rollout.engine_tp > 1) * device.group_gib
    return RolloutMemory(
        weights=weights,
        kv_cache=cache,
        training=training,
        beyond=0.0 if device.engine_counts_all else calibrated("engine_gib") + graphs_gib,
        asleep=0.0 if rollout.gpus else asleep,
        syncing=0.0 if rollout.gpus else beside + train.whole_matrix + train.buffers + weights,
        kv_tokens=max(0, round(cache * GIB / kv_bytes)),
    )
