"""Find faster settings that fit: layouts, recomputation, offloading and the engines' share."""

import math
from collections.abc import Iterator
from typing import Any

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.model.activations import layers_to_recompute, token_memory
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.hardware import DEVICES_PER_NODE, Hardware
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.plan import Plan, make_plan, trainers

SIZES = (1, 2, 4, 8)
MICRO_BATCH_STEP = 1024
FRACTIONS = tuple(percent / 100 for percent in range(30, 95, 5))

Config = SftConfig | RlConfig


def proposals(config: Config, shape: ModelShape, hardware: Hardware, lengths: Lengths, limit: int = 5) -> list[Plan]:
    """The fastest settings of each layout (TP, PP, CP, EP) that fits, best layout first.

    Batch, lengths and the optimizer's precision stay the run's own. The optimizer goes to the host
    only when nothing else fits, because nobody has measured its steps there. Among equally fast
    settings, those that need less memory come first.
    """
    found: list[Plan] = []
    for on_cpu in (0.0,) if config.lora.rank else (0.0, 1.0):
        for layout in _layouts(_with(config, "memory", optimizer_on_cpu=on_cpu), shape, trainers(config, hardware)):
            plan = _fastest(layout, shape, hardware, lengths)
            found += [plan] if plan is not None else []
        if found:
            break
    return sorted(found, key=_rank)[:limit]


def _rank(plan: Plan) -> tuple[float, float]:
    return round(plan.step_s, 3), plan.need_gib


def _fastest(config: Config, shape: ModelShape, hardware: Hardware, lengths: Lengths) -> Plan | None:
    """The fastest plan of one layout that fits, or None."""

    def plans(variants: Iterator[Config]) -> list[Plan]:
        return [make_plan(varied, shape, hardware, lengths=lengths) for varied in variants]

    trainings = [plan for plan in plans(_trainings(config, shape)) if plan.training_fits]
    best = min(trainings, key=lambda plan: (plan.step_s, plan.train.total), default=None)
    if best is None or not isinstance(best.config, RlConfig):
        return best
    rollouts = [plan for plan in plans(_rollouts(best.config, shape, hardware)) if plan.fits]
    return min(rollouts, key=_rank, default=None)


def _with(config: Any, section: str, **changes: Any) -> Any:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _layouts(config: Config, shape: ModelShape, hardware: Hardware) -> Iterator[Config]:
    for tp in SIZES:
        for pp in SIZES:
            for cp in SIZES:
                ranks = tp * pp * cp
                if hardware.count % ranks or shape.kv_heads % tp or shape.layers % pp or tp * cp > DEVICES_PER_NODE:
                    continue
                dp = hardware.count // ranks
                if isinstance(config, RlConfig):
                    batch = config.train.mini_batch_prompts * config.rollout.group_size
                else:
                    batch = config.train.global_batch
                if batch % dp:
                    continue
                if not shape.experts:
                    yield _with(config, "parallel", tp=tp, pp=pp, cp=cp, ep=1, etp=0, vpp=1)
                    continue
                for ep in SIZES:  # over all ranks of a stage, as experts stay whole: a part of one is a small product
                    if tp * cp * dp % ep == 0 and shape.experts % ep == 0:
                        yield _with(config, "parallel", tp=tp, pp=pp, cp=cp, ep=ep, etp=1, vpp=1)


def _trainings(config: Config, shape: ModelShape) -> Iterator[Config]:
    """Yield the ways to recompute.

    A micro-batch holds just the longest sequence, or less with "auto". A model with experts
    recomputes everything, because nobody knows ahead how many tokens an expert gets, and has longer
    micro-batches, too, so that each expert has tokens enough.
    """
    whole = math.ceil(config.max_sequence_tokens / config.parallel.cp)
    layers = math.ceil(shape.layers / config.parallel.pp)

    def varied(recompute: str | int, tokens: int) -> Config:
        changed = _with(config, "memory", recompute=recompute)
        return _with(changed, "train", micro_batch_tokens=tokens)

    yield varied("full", whole)
    if shape.experts:
        yield from (varied("full", times * whole) for times in (2, 3))
        return
    yield varied("none", whole)
    yield varied("selective", whole)
    for quarter in (1, 2, 3):
        if 0 < (some := layers * quarter // 4) < layers:
            yield varied(some, whole)
    rest, input_share = token_memory(shape, fused_cross_entropy=config.memory.fused_cross_entropy)
    for tokens in range(MICRO_BATCH_STEP, whole, MICRO_BATCH_STEP):
        if layers_to_recompute(whole, tokens, layers, rest=rest, input_share=input_share) <= layers:
            yield varied("auto", tokens)


def _rollouts(config: RlConfig, shape: ModelShape, hardware: Hardware) -> Iterator[RlConfig]:
    """Yield the ways to place the idle actor, split an engine over GPUs, and size its share.

    vLLM's engines on NPUs keep their engine_tp, because decoding was fitted to SGLang on H200. An
    actor that does not share its devices with engines stays where it is.
    """
    serving = config.rollout.gpus or hardware.count
    for offload in (config.memory.offload_idle,) if config.rollout.gpus else (False, True):
        for tp in SIZES if hardware.device.decoding_fitted else (config.rollout.engine_tp,):
            if serving % tp or shape.kv_heads % tp:
                continue
            for fraction in (each for each in FRACTIONS if each <= hardware.device.engine_share):
                changed = _with(config, "memory", offload_idle=offload)
                yield _with(changed, "rollout", engine_tp=tp, engine_memory_fraction=fraction)
