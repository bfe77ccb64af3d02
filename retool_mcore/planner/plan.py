"""One plan: does a layout fit, where does the memory go, how long is a step; and which layouts would be better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig
from retool_mcore.planner.calibration import of
from retool_mcore.planner.hardware import DEVICES_PER_NODE, Hardware
from retool_mcore.planner.memory import RolloutMemory, TrainMemory, rollout_memory, train_memory
from retool_mcore.planner.shape import ModelShape
from retool_mcore.planner.steptime import (
    Work,
    bubble,
    decode,
    optimizer_s,
    pass_s,
    passes_of,
    sync_s,
)


@dataclass(frozen=True, kw_only=True)
class Sandboxes:
    """What the tool calls of one step ask of the sandbox."""

    calls_per_s: float  # of all nodes, while rollouts last
    cores_per_node: float  # kept busy by them
    workers_per_node: int  # sandbox.workers


@dataclass(frozen=True, kw_only=True)
class Plan:
    parallel: Parallel
    memory: Memory
    micro_batch_tokens: int
    dp: int
    train: TrainMemory
    rollout: RolloutMemory | None
    phases: dict[str, float]  # name -> s of one step
    mean_tokens: float  # of a sequence, prompt and response: assumed or given
    tokens_per_step: float
    steps: int
    device_gib: float
    notes: tuple[str, ...] = ()
    sandbox: Sandboxes | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def need_gib(self) -> float:
        """Of the fullest device at its fullest moment."""
        return max(self.train.total, self.rollout.total if self.rollout else 0.0)

    @property
    def missing_gib(self) -> float:
        """How much more memory a device would have to have; negative: what is left.

        Training must leave a share for what fragments; of a rollout, rollout.engine_memory_fraction has seen to that.
        """
        missing = self.train.total - of("usable") * self.device_gib
        if self.rollout is not None:
            missing = max(missing, self.rollout.total - self.device_gib, -self.rollout.kv_cache)
        return missing

    @property
    def fits(self) -> bool:
        return self.missing_gib <= 0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for --json."""
        parts = {
            "parallel": self.parallel.model_dump(),
            "memory": self.memory.model_dump(),
            "micro_batch_tokens": self.micro_batch_tokens,
            "dp": self.dp,
            "fits": self.fits,
            "missing_gib": self.missing_gib,
            "device_gib": self.device_gib,
            "train_gib": asdict(self.train) | {"total": self.train.total},
            "step_s": self.step_s,
            "phases_s": self.phases,
            "tokens_per_step": self.tokens_per_step,
            "total_hours": self.step_s * self.steps / 3600,
            "notes": list(self.notes),
        }
        if self.rollout is not None:
            parts["rollout_gib"] = asdict(self.rollout) | {"total": self.rollout.total}
        if self.sandbox is not None:
            parts["sandbox"] = asdict(self.sandbox)
        return parts


def make_plan(
    config: SftConfig | RlConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    mean_tokens: float | None = None,
    parallel: Parallel | None = None,
    memory: Memory | None = None,
) -> Plan:
    """The plan of a run as configured, or with another layout; micro-batches then hold just a longest sequence."""
    changed = parallel is not None or memory is not None
    parallel, memory = parallel or config.parallel, memory or config.memory
    dp = hardware.count // parallel.model_parallel
    micro = math.ceil(config.max_sequence_tokens / parallel.cp) if changed else config.train.micro_batch_tokens
    train = train_memory(shape, parallel, memory, dp=dp, micro_batch_tokens=micro, fused=hardware.device.fused)
    if isinstance(config, RlConfig):
        return _rl_plan(
            config, shape, hardware,
            parallel=parallel, memory=memory, dp=dp, micro=micro, train=train, mean_tokens=mean_tokens,
        )  # fmt: skip
    mean = mean_tokens or config.max_sequence_tokens / 4
    work = Work.of(config.train.global_batch, mean)
    seconds = _train_s(shape, hardware, parallel, memory, work, micro=micro, dp=dp)
    phases = {"train": seconds, "optimizer": optimizer_s(shape, hardware, parallel, memory, dp)}
    return Plan(
        parallel=parallel, memory=memory, micro_batch_tokens=micro, dp=dp, train=train, rollout=None, phases=phases,
        mean_tokens=mean, tokens_per_step=work.tokens, steps=config.train.steps, device_gib=hardware.device.memory_gib,
        notes=_mean_note(mean_tokens, mean, "a quarter of data.max_length_tokens"),
    )  # fmt: skip


def _rl_plan(
    config: RlConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    parallel: Parallel,
    memory: Memory,
    dp: int,
    micro: int,
    train: TrainMemory,
    mean_tokens: float | None,
) -> Plan:
    r = config.rollout
    rollout = rollout_memory(
        shape, train, memory, engine_tp=r.engine_tp, fraction=r.engine_memory_fraction,
        device_gib=hardware.device.memory_gib,
    )  # fmt: skip
    mean_prompt = config.data.max_prompt_tokens / 2
    mean = mean_tokens or mean_prompt + r.max_response_tokens / 2
    responses = config.train.prompts_per_step * r.group_size
    decoding = decode(shape, hardware, config, rollout, max(1.0, mean - mean_prompt))
    work = Work.of(responses, mean)
    updates = config.train.prompts_per_step // config.train.mini_batch_prompts
    forward = pass_s(shape, hardware, parallel, work, passes=1)
    optimizer = updates * optimizer_s(shape, hardware, parallel, memory, dp)
    phases = {
        "generate": decoding.seconds,
        "old_log_prob": forward * bubble(parallel, work.tokens / dp / micro) + of("infer_phase_s"),
        "update": _train_s(shape, hardware, parallel, memory, work, micro=micro, dp=dp) + optimizer + of("update_s"),
        "weight_sync": sync_s(shape),
    }
    if memory.offload_idle:  # weights and optimizer over the host's link, out and in, at 20 GB/s
        phases["offload"] = 2 * (train.weights + train.optimizer) * 2**30 / 20e9
    notes = (
        *_mean_note(mean_tokens, mean, "half of the longest prompt and of the longest response"),
        f"generation waits for {decoding.limit}: {decoding.concurrency:.0f} responses at once in each of "
        f"{hardware.count // r.engine_tp} engines, {decoding.tokens_per_s:,.0f} tokens/s in all",
    )
    return Plan(
        parallel=parallel, memory=memory, micro_batch_tokens=micro, dp=dp, train=train, rollout=rollout, phases=phases,
        mean_tokens=mean, tokens_per_step=work.tokens, steps=config.train.steps, device_gib=hardware.device.memory_gib,
        notes=notes, sandbox=_sandboxes(config, decoding.seconds) if r.tool else None,
    )  # fmt: skip


def _train_s(
    shape: ModelShape, hardware: Hardware, parallel: Parallel, memory: Memory, work: Work, *, micro: int, dp: int
) -> float:
    passes = passes_of(memory, math.ceil(shape.layers / parallel.pp))
    return pass_s(shape, hardware, parallel, work, passes=passes) * bubble(
        parallel, work.tokens / dp / (micro * parallel.cp)
    )


def _mean_note(given: float | None, mean: float, rule: str) -> tuple[str, ...]:
    return () if given else (f"mean length {mean:,.0f} tokens is assumed, {rule}; --mean-tokens sets it",)


def _sandboxes(config: RlConfig, seconds: float) -> Sandboxes:
    calls = config.train.prompts_per_step * config.rollout.group_size * of("calls") / seconds
    nodes = config.cluster.nodes
    cores = calls * of("execution_cpu_s") / nodes
    # Calls come in bursts: all responses of a step start together. Twice the mean, and at least a few.
    return Sandboxes(calls_per_s=calls, cores_per_node=cores, workers_per_node=max(4, math.ceil(2 * cores)))


def proposals(
    config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware, mean_tokens: float | None, limit: int = 5
) -> list[Plan]:
    """The fastest layouts that fit, best first: TP, PP, CP, recomputation, and the optimizer on the host if need be."""
    plans = [
        plan
        for parallel in _layouts(config, shape, hardware)
        for memory in _memories(config)
        if (plan := make_plan(config, shape, hardware, mean_tokens=mean_tokens, parallel=parallel, memory=memory)).fits
    ]
    best: dict[tuple[int, ...], Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.step_s):
        best.setdefault((plan.parallel.tp, plan.parallel.pp, plan.parallel.cp, plan.parallel.ep), plan)
    return list(best.values())[:limit]


def _layouts(config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware) -> Iterator[Parallel]:
    sizes = (1, 2, 4, 8)
    for tp in sizes:
        for pp in sizes:
            for cp in sizes:
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
                for ep in sizes if shape.experts else (1,):
                    if dp % ep == 0 and shape.experts % ep == 0:
                        layout = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": 1}
                        yield config.parallel.model_copy(update=layout)


def _memories(config: SftConfig | RlConfig) -> Iterator[Memory]:
    for recompute in ("none", "selective", "full"):
        for on_cpu in (0.0, 1.0):
            changes = {"recompute": recompute, "recompute_layers": 0, "optimizer_on_cpu": on_cpu}
            yield config.memory.model_copy(update=changes)
