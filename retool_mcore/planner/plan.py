"""One plan: whether a run fits as configured, where memory goes, how long a step takes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import Hardware
from retool_mcore.planner.memory import RolloutMemory, TrainMemory, rollout_memory, train_memory
from retool_mcore.planner.steptime import (
    Lengths,
    Work,
    decode,
    offload_s,
    optimizer_s,
    pass_s,
    passes_of,
    stretch,
    sync_s,
)


@dataclass(frozen=True, kw_only=True)
class Sandboxes:
    """The load that the tool calls of one step put on the sandbox."""

    calls_per_s: float  # over all nodes, during rollouts
    cores_per_node: float  # kept busy by the calls
    workers_per_node: int  # the value for sandbox.workers


STALL_MARGIN = 2.0  # of train.stall_s over what is planned: first steps and long batches take longer


@dataclass(frozen=True, kw_only=True)
class Plan:
    config: SftConfig | RlConfig
    dp: int
    train: TrainMemory
    rollout: RolloutMemory | None
    phases: dict[str, float]  # name -> seconds per step
    parts: dict[str, float]  # what ends with a sign of life (run/alive.py) -> seconds of the longest
    mean_tokens: float  # of a sequence, prompt and response together: assumed or given
    tokens_per_step: float
    steps: int
    device_gib: float
    notes: tuple[str, ...] = ()
    sandbox: Sandboxes | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def longest_part(self) -> tuple[str, float]:
        """What a run waits for longest without a sign of life, and how long."""
        return max(self.parts.items(), key=lambda part: part[1])

    @property
    def stall_problem(self) -> str:
        """What is wrong with train.stall_s, and what would do; "" where it leaves enough room."""
        stall_s, (part, seconds) = self.config.train.stall_s, self.longest_part
        if not stall_s or stall_s >= STALL_MARGIN * seconds:
            return ""
        wrong = "would end the run" if stall_s < seconds else f"leaves less than {STALL_MARGIN:g} times that"
        return (
            f"train.stall_s = {stall_s:g} {wrong}: {part} is planned to take {seconds:,.0f} s, without a sign of life. "
            f"Set at least {math.ceil(STALL_MARGIN * seconds)}, or 0"
        )

    @property
    def parallel(self) -> Parallel:
        return self.config.parallel

    @property
    def memory(self) -> Memory:
        return self.config.memory

    @property
    def micro_batch_tokens(self) -> int:
        return self.config.train.micro_batch_tokens

    @property
    def training_gib(self) -> float:
        """Memory of a device while it trains, with a sleeping rollout engine beside it."""
        return self.train.total + (calibrated("asleep_gib") if self.rollout else 0.0)

    @property
    def need_gib(self) -> float:
        """Memory of the fullest device at its fullest moment."""
        return max(self.training_gib, self.rollout.total if self.rollout else 0.0)

    @property
    def training_fits(self) -> bool:
        return self.training_gib <= calibrated("usable_memory") * self.device_gib

    @property
    def missing_gib(self) -> float:
        """How much more memory a device would need; negative: what is left.

        Training must leave a share for fragmentation. For rollouts the engine already leaves room
        (``engine_gib``).
        """
        missing = self.training_gib - calibrated("usable_memory") * self.device_gib
        if self.rollout is not None:
            missing = max(missing, self.rollout.total - self.device_gib, -self.rollout.kv_cache)
        return missing

    @property
    def fits(self) -> bool:
        return self.missing_gib <= 0

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for --json."""
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
            "parts_s": self.parts,
            "tokens_per_step": self.tokens_per_step,
            "total_hours": self.step_s * self.steps / 3600,
            "notes": list(self.notes),
        }
        if self.rollout is not None:
            parts["rollout_gib"] = asdict(self.rollout) | {"total": self.rollout.total}
        if isinstance(self.config, RlConfig):
            names = ("engine_tp", "engine_memory_fraction")
            parts["rollout"] = {name: getattr(self.config.rollout, name) for name in names}
        if self.sandbox is not None:
            parts["sandbox"] = asdict(self.sandbox)
        return parts


def make_plan(
    config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware, *, mean_tokens: float | None = None
) -> Plan:
    """Plan a run as it is configured."""
    parallel, memory, micro = config.parallel, config.memory, config.train.micro_batch_tokens
    dp = hardware.count // parallel.model_parallel
    train = train_memory(
        shape, parallel, memory, dp=dp, micro_batch_tokens=micro, fused=hardware.device.fused,
        fp8=config.model.fp8 != "off",
    )  # fmt: skip
    if isinstance(config, RlConfig):
        return _rl_plan(config, shape, hardware, dp=dp, train=train, mean_tokens=mean_tokens)
    mean = mean_tokens or config.max_sequence_tokens / 4
    work = Work.of(config.train.global_batch, mean)
    phases = {
        "train": _train_s(config, shape, hardware, work, updates=1, mean=mean),
        "optimizer": optimizer_s(shape, hardware, parallel, memory, dp),
    }
    return Plan(
        config=config, dp=dp, train=train, rollout=None, phases=phases, parts={"an update": sum(phases.values())},
        mean_tokens=mean, tokens_per_step=work.tokens, steps=config.train.steps, device_gib=hardware.device.memory_gib,
        notes=_mean_note(mean_tokens, mean, "a quarter of data.max_length_tokens"),
    )  # fmt: skip


def _rl_plan(
    config: RlConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    dp: int,
    train: TrainMemory,
    mean_tokens: float | None,
) -> Plan:
    r, parallel, memory = config.rollout, config.parallel, config.memory
    rollout = rollout_memory(shape, train, memory, r, device=hardware.device)
    mean_prompt = config.data.max_prompt_tokens / 2
    mean = mean_tokens or mean_prompt + r.max_response_tokens / 2
    responses = config.train.prompts_per_step * r.group_size
    decoding = decode(shape, hardware, config, rollout, max(1.0, mean - mean_prompt))
    work = Work.of(responses, mean)
    updates = config.train.prompts_per_step // config.train.mini_batch_prompts
    micro_batches = work.tokens / dp / (config.train.micro_batch_tokens * parallel.cp)
    fp8 = config.model.fp8 != "off"
    forward = pass_s(
        shape, hardware, parallel, work, passes=1, micro_batches=math.ceil(micro_batches), fp8=fp8
    ) * stretch(shape, parallel, micro_batches)
    training = _train_s(config, shape, hardware, work, updates=updates, mean=mean)
    optimizer = updates * optimizer_s(shape, hardware, parallel, memory, dp)
    phases = {
        "generate": decoding.seconds,
        **({"old_log_prob": forward + calibrated("infer_phase_s")} if config.algorithm.old_log_prob == "actor" else {}),
        "update": training + optimizer + calibrated("update_s"),
        "weight_sync": sync_s(shape),
    }
    parts = {"a turn": decoding.longest_turn_s, "an update": phases["update"] / updates}
    if "old_log_prob" in phases:
        parts["the pass over old log-probabilities"] = phases["old_log_prob"]
    if memory.offload_idle:
        phases["offload"] = offload_s(train)
    notes = (
        *_mean_note(mean_tokens, mean, "half of the longest prompt and of the longest response"),
        f"generation waits for {decoding.limit}: {decoding.concurrency:.0f} responses at once in each of "
        f"{hardware.count // r.engine_tp} engines, {decoding.tokens_per_s:,.0f} tokens/s in all",
    )
    return Plan(
        config=config, dp=dp, train=train, rollout=rollout, phases=phases, parts=parts,
        mean_tokens=mean, tokens_per_step=work.tokens, steps=config.train.steps, device_gib=hardware.device.memory_gib,
        notes=notes, sandbox=_sandboxes(config, decoding.seconds) if r.tool else None,
    )  # fmt: skip


def _train_s(
    config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware, work: Work, *, updates: int, mean: float
) -> float:
    """Seconds of the forward and backward passes of one step, which makes ``updates`` updates."""
    parallel, memory, micro = config.parallel, config.memory, config.train.micro_batch_tokens
    twice = 0.0
    if memory.recompute == "auto":
        twice = Lengths(mean=mean, longest=config.max_sequence_tokens).recomputed(shape, parallel, memory, micro)
    passes = passes_of(memory, math.ceil(shape.layers / parallel.pp), twice)
    micro_batches = work.tokens * parallel.tp * parallel.pp / hardware.count / micro / updates
    seconds = pass_s(
        shape, hardware, parallel, work,
        passes=passes, micro_batches=math.ceil(micro_batches) * updates, fp8=config.model.fp8 != "off",
    )  # fmt: skip
    return seconds * stretch(shape, parallel, micro_batches)


def _mean_note(given: float | None, mean: float, rule: str) -> tuple[str, ...]:
    return () if given else (f"mean length {mean:,.0f} tokens is assumed, {rule}; --mean-tokens sets it",)


def _sandboxes(config: RlConfig, seconds: float) -> Sandboxes:
    calls = config.train.prompts_per_step * config.rollout.group_size * calibrated("calls") / seconds
    nodes = config.cluster.nodes
    cores = calls * calibrated("execution_cpu_s") / nodes
    # Calls come in bursts, because all responses of a step start together. So the number of workers
    # is twice the mean load, and at least 4.
    return Sandboxes(calls_per_s=calls, cores_per_node=cores, workers_per_node=max(4, math.ceil(2 * cores)))
