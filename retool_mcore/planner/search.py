"""Searches for faster settings that fit: layouts, recomputation, offloading, engine memory."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.hardware import DEVICES_PER_NODE, Hardware
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.plan import Plan, make_plan, training_devices

SIZES = (1, 2, 4, 8)
FRACTIONS = tuple(percent / 100 for percent in range(30, 95, 5))

Config = SftConfig | RlConfig


def proposals(config: Config, shape: ModelShape, hardware: Hardware, lengths: Lengths, limit: int = 5) -> list[Plan]:
    """The fastest settings of each layout (TP, PP, CP, EP) that fits, best layout first.

    The batch, the lengths and the optimizer's precision stay as configured. Optimizer states are
    offloaded to the CPU only if nothing else fits. Equally fast settings are sorted by memory.
    """
    plans: list[Plan] = []
    for on_cpu in (0.0,) if config.lora.rank else (0.0, 1.0):
        for layout in _layouts(
            _with(config, "memory", optimizer_on_cpu=on_cpu), shape, training_devices(config, hardware)
        ):
            plan = _fastest(layout, shape, hardware, lengths)
            plans += [plan] if plan is not None else []
        if plans:
            break
    return sorted(plans, key=_rank)[:limit]


def _rank(plan: Plan) -> tuple[float, float]:
    return round(plan.step_s, 3), plan.need_gib


def _fastest(config: Config, shape: ModelShape, hardware: Hardware, lengths: Lengths) -> Plan | None:
    """The fastest plan for one layout that fits, or None."""
    trainings = [make_plan(training, shape, hardware, lengths=lengths) for training in _trainings(config, shape)]
    best = min((plan for plan in trainings if plan.training_fits), key=_rank, default=None)
    if best is None or not isinstance(best.config, RlConfig):
        return best
    rollouts = [
        make_plan(rollout, shape, hardware, lengths=lengths) for rollout in _rollouts(best.config, shape, hardware)
    ]
    return min((plan for plan in rollouts if plan.fits), key=_rank, default=None)


def _with(config: Any, section: str, **changes: Any) -> Any:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _layouts(config: Config, shape: ModelShape, hardware: Hardware) -> Iterator[Config]:
    """Yield the layouts. Experts are distributed over a stage's ranks, never split (etp = 1)."""
    if isinstance(config, RlConfig):
        batch = config.train.mini_batch_prompts * config.rollout.group_size
    else:
        batch = config.train.global_batch
    for tp, pp, cp, ep in product(SIZES, SIZES, SIZES, SIZES if shape.experts else (1,)):
        if hardware.count % (tp * pp * cp) or shape.kv_heads % tp or shape.layers % pp or tp * cp > DEVICES_PER_NODE:
            continue
        dp = hardware.count // (tp * pp * cp)
        if batch % dp == 0 and tp * cp * dp % ep == 0 and (ep == 1 or shape.experts % ep == 0):
            yield _with(config, "parallel", tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if shape.experts else 0, vpp=1)


def _trainings(config: Config, shape: ModelShape) -> Iterator[Config]:
    """Yield the recomputation modes, each with several sizes of micro-batches.

    A micro-batch has the longest sequence or the configured size; with "auto", it may be smaller.
    An MoE model uses full recomputation with 1 to 3 times the longest sequence, because the number
    of tokens per expert is not known in advance.
    """
    longest = math.ceil(config.max_sequence_tokens / config.parallel.cp)
    sizes = sorted({longest, max(longest, config.train.micro_batch_tokens)})
    ways = [(recompute, size) for recompute in ("full", "none") for size in sizes]
    ways += [("auto", longest * quarters // 4) for quarters in (1, 2, 3)]
    if shape.experts:
        ways = [("full", times * longest) for times in (1, 2, 3)]
    for recompute, tokens in ways:
        yield _with(_with(config, "memory", recompute=recompute), "train", micro_batch_tokens=tokens)


def _rollouts(config: RlConfig, shape: ModelShape, hardware: Hardware) -> Iterator[RlConfig]:
    """Yield combinations of actor offloading, engine_tp and engine_memory_fraction.

    vLLM engines on NPUs keep their engine_tp, because decoding is calibrated for SGLang on H100 and
    H200. An actor on separate devices keeps its offload setting.
    """
    serving = config.rollout.gpus or hardware.count
    offloads = (config.memory.offload_idle,) if config.rollout.gpus else (False, True)
    sizes = SIZES if hardware.device.decoding_fitted else (config.rollout.engine_tp,)
    for offload, tp, fraction in product(offloads, sizes, FRACTIONS):
        if serving % tp == 0 and shape.kv_heads % tp == 0 and fraction <= hardware.device.engine_share:
            changed = _with(config, "memory", offload_idle=offload)
            yield _with(changed, "rollout", engine_tp=tp, engine_memory_fraction=fraction)
