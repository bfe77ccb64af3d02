"""Computes a plan: whether a run fits as configured, its memory by component, its step time."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from retool_mcore.config import Memory, Parallel, RlConfig, SftConfig
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.generation import calls_of, decode
from retool_mcore.planner.hardware import Hardware
from retool_mcore.planner.lengths import Lengths, assumed
from retool_mcore.planner.memory import RolloutMemory, TrainMemory, rollout_memory, train_memory
from retool_mcore.planner.steptime import Work, offload_s, optimizer_s, pass_s, passes_of, pipeline_slowdown, sync_s


@dataclass(frozen=True, kw_only=True)
class SandboxLoad:
    """The load of a step's tool calls on the sandbox."""

    calls_per_s: float  # over all nodes, during rollouts
    cores_per_node: float  # CPU cores that the calls keep busy
    workers_per_node: int  # recommended sandbox.workers


STALL_MARGIN = 2.0  # minimum train.stall_s / planned time; first steps and long batches take longer


@dataclass(frozen=True, kw_only=True)
class Plan:
    config: SftConfig | RlConfig
    dp: int
    train: TrainMemory
    rollout: RolloutMemory | None
    phases: dict[str, float]  # name -> seconds per step
    parts: dict[str, float]  # part of a step between two heartbeats (run/heartbeat.py) -> its maximum seconds
    mean_tokens: float  # mean sequence length (prompt + response), assumed or known
    tokens_per_step: float
    steps: int
    device_gib: float
    notes: tuple[str, ...] = ()
    sandbox: SandboxLoad | None = None

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def longest_part(self) -> tuple[str, float]:
        """The longest time in a step without a heartbeat: (name, seconds)."""
        return max(self.parts.items(), key=lambda part: part[1])

    @property
    def stall_problem(self) -> str:
        """The problem with train.stall_s and a sufficient value; "" if the margin is enough."""
        stall_s, (part, seconds) = self.config.train.stall_s, self.longest_part
        if not stall_s or stall_s >= STALL_MARGIN * seconds:
            return ""
        wrong = "would end the run" if stall_s < seconds else "leaves too little margin"
        return (
            f"train.stall_s = {stall_s:g} {wrong}: {part} is planned to take {seconds:,.0f} s without progress. Set "
            f"at least {math.ceil(STALL_MARGIN * seconds)}, or 0"
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
        """Memory of a device during training, including an idle, colocated engine."""
        return self.train.total + (self.rollout.asleep if self.rollout else 0.0)

    @property
    def need_gib(self) -> float:
        """Peak memory of the fullest device."""
        return max(self.training_gib, self.rollouts_gib)

    @property
    def rollouts_gib(self) -> float:
        """Peak memory of a device during rollouts and weight sync; 0 for SFT."""
        return max(self.rollout.total, self.rollout.syncing) if self.rollout else 0.0

    @property
    def training_fits(self) -> bool:
        return self.training_gib <= calibrated("usable_memory") * self.device_gib

    @property
    def missing_gib(self) -> float:
        """Memory that a device lacks; negative if there is memory left.

        Training must leave a share for fragmentation (``usable_memory``). For rollouts, the engine
        already reserves that room (``engine_gib``).
        """
        missing = self.training_gib - calibrated("usable_memory") * self.device_gib
        if self.rollout is not None:
            missing = max(missing, self.rollouts_gib - self.device_gib, -self.rollout.kv_cache)
        return missing

    @property
    def fits(self) -> bool:
        return self.missing_gib <= 0

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible values, for --json."""
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


def training_devices(config: SftConfig | RlConfig, hardware: Hardware) -> Hardware:
    """The training devices: all, or in mode "async" those without engines."""
    own = config.rollout.gpus if isinstance(config, RlConfig) else 0
    return Hardware(hardware.device, hardware.count - own)


def make_plan(
    config: SftConfig | RlConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    mean_tokens: float | None = None,
    lengths: Lengths | None = None,
) -> Plan:
    """Plan a run as configured. Without ``lengths``, assume them from the configuration."""
    parallel, memory, micro = config.parallel, config.memory, config.train.micro_batch_tokens
    training = training_devices(config, hardware)
    dp = training.count // parallel.model_parallel
    train = train_memory(
        shape, parallel, memory, dp=dp, micro_batch_tokens=micro, fused=hardware.device.fused,
        fp8=config.model.fp8 != "off", lora=config.lora, group_gib=hardware.device.group_gib,
    )  # fmt: skip
    lengths = lengths or assumed(config, mean_tokens)
    if isinstance(config, RlConfig):
        return _rl_plan(config, shape, hardware, dp=dp, train=train, lengths=lengths)
    work = Work.of(config.train.global_batch, lengths.sequence, calibrated("spread"))
    phases = {
        "train": _train_s(config, shape, training, work, updates=1, lengths=lengths),
        "optimizer": optimizer_s(shape, training, parallel, memory, dp, lora=config.lora),
    }
    return Plan(
        config=config, dp=dp, train=train, rollout=None, phases=phases, parts={"an update": sum(phases.values())},
        mean_tokens=lengths.sequence, tokens_per_step=work.tokens, steps=config.train.steps,
        device_gib=hardware.device.memory_gib, notes=(lengths.note,) if lengths.note else (),
    )  # fmt: skip


def _rl_plan(
    config: RlConfig, shape: ModelShape, hardware: Hardware, *, dp: int, train: TrainMemory, lengths: Lengths
) -> Plan:
    rollout = rollout_memory(shape, train, config.memory, config.rollout, device=hardware.device)
    work = Work.of(config.train.prompts_per_step * config.rollout.group_size, lengths.sequence, lengths.spread)
    training = _training_phases(
        config, shape, training_devices(config, hardware), dp=dp, train=train, work=work, lengths=lengths
    )
    training_s = sum(training.values())
    decoding = decode(shape, hardware, config, rollout, lengths, training_s=training_s)
    parts = {"a turn": decoding.longest_turn_s, "an update": training["update"] / config.train.updates_per_step}
    if "old_log_prob" in training:
        parts["the pass for old log-probabilities"] = training["old_log_prob"]
    mode, engines = config.train.mode, (config.rollout.gpus or hardware.count) // config.rollout.engine_tp
    notes = (
        *((lengths.note,) if lengths.note else ()),
        f"generation is limited by {decoding.limit}: {decoding.concurrency:.0f} concurrent responses in each of "
        f"{engines} engines, {decoding.tokens_per_s:,.0f} tokens/s in total",
        *([f'mode "{mode}": generate is the time that the trainer waits'] if mode == "async" else []),
    )
    sampling_s = decoding.seconds + (training_s if mode == "async" else 0.0)
    return Plan(
        config=config, dp=dp, train=train, rollout=rollout, phases={"generate": decoding.seconds} | training,
        parts=parts, mean_tokens=lengths.sequence, tokens_per_step=work.tokens, steps=config.train.steps,
        device_gib=hardware.device.memory_gib, notes=notes,
        sandbox=_sandboxes(config, sampling_s, calls_of(config, lengths)) if config.rollout.tool else None,
    )  # fmt: skip


def _training_phases(
    config: RlConfig, shape: ModelShape, devices: Hardware, *,
    dp: int, train: TrainMemory, work: Work, lengths: Lengths,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step's phases other than generation. ``devices``: the training devices."""
    parallel, memory, updates = config.parallel, config.memory, config.train.updates_per_step
    micro_batches = work.tokens / dp / (config.train.micro_batch_tokens * parallel.cp)
    responses = config.train.prompts_per_step * config.rollout.group_size
    phases: dict[str, float] = {}
    if config.algorithm.old_log_prob == "actor":
        forward = pass_s(
            shape, devices, parallel, work, passes=1, micro_batches=math.ceil(micro_batches),
            fp8=config.model.fp8 != "off", lora=config.lora,
        )  # fmt: skip
        phases["old_log_prob"] = forward * pipeline_slowdown(shape, parallel, micro_batches) + calibrated("phase_s")
    update = _train_s(config, shape, devices, work, updates=updates, lengths=lengths)
    update += updates * (optimizer_s(shape, devices, parallel, memory, dp, lora=config.lora) + calibrated("phase_s"))
    phases["update"] = update + responses / dp * calibrated("update_response_s")
    phases["weight_sync"] = sync_s(shape, running=config.train.mode != "sync")
    if memory.offload_idle:
        phases["offload"] = offload_s(train, devices)
    phases["other"] = responses * calibrated("driver_response_s")
    return phases


def _train_s(
    config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware, work: Work, *, updates: int, lengths: Lengths
) -> float:
    """Seconds of the forward and backward passes of a step with ``updates`` optimizer updates."""
    parallel, memory, micro = config.parallel, config.memory, config.train.micro_batch_tokens
    twice = lengths.recomputed(shape, parallel, memory, micro) if memory.recompute == "auto" else 0.0
    micro_batches = work.tokens * parallel.tp * parallel.pp / hardware.count / micro / updates
    seconds = pass_s(
        shape, hardware, parallel, work,
        passes=passes_of(memory, math.ceil(shape.layers / parallel.pp), twice),
        micro_batches=math.ceil(micro_batches) * updates, fp8=config.model.fp8 != "off", lora=config.lora,
    )  # fmt: skip
    return seconds * pipeline_slowdown(shape, parallel, micro_batches)


def _sandboxes(config: RlConfig, seconds: float, calls: float) -> SandboxLoad:
    calls_per_s = config.train.prompts_per_step * config.rollout.group_size * calls / seconds
    cores = calls_per_s * calibrated("execution_cpu_s") / config.cluster.nodes
    # Calls come in bursts, because all responses of a step start together. So recommend workers for
    # twice the mean load, and at least 4.
    return SandboxLoad(calls_per_s=calls_per_s, cores_per_node=cores, workers_per_node=max(4, math.ceil(2 * cores)))
