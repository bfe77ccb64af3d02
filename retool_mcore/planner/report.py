"""Formats a plan as text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import CALIBRATION, calibrated
from retool_mcore.planner.hardware import Hardware
from retool_mcore.planner.plan import Plan

# Fields of RolloutMemory -> labels.
ROLLOUT_PARTS = {
    "weights": "engine weights",
    "kv_cache": "KV cache",
    "states": "DeltaNet states",
    "training": "idle actor",
    "beyond": "engine buffers",
}


def report(
    config: SftConfig | RlConfig, shape: ModelShape, hardware: Hardware, plan: Plan, others: Sequence[Plan]
) -> str:
    """The text of a plan: memory, time by phase, sandbox load, whether it fits, faster settings."""
    lines = [
        f"{config.source} on {hardware.name}: {shape.params / 1e9:.3g} G parameters, {_layout(plan)}",
        f"estimates: {sum('assumed' in c.source for c in CALIBRATION.values())} of {len(CALIBRATION)} constants are "
        "assumed, the others are fitted to runs on H100 and H200. Measured steps differ by up to 20 %",
        "",
        *_memory_lines(plan),
        "",
        *_time_lines(plan),
    ]
    if plan.sandbox is not None:
        s = plan.sandbox
        lines += [
            "",
            f"sandbox: {s.calls_per_s:.0f} calls/s during rollouts keep {s.cores_per_node:.1f} cores per node busy; "
            f"recommended: sandbox.workers = {s.workers_per_node}",
        ]
        if isinstance(config, RlConfig) and config.sandbox.workers < s.workers_per_node:
            lines.append(f"warning: sandbox.workers = {config.sandbox.workers} is lower")
    lines += ["", *(f"note: {note}" for note in plan.notes)]
    lines += [f"warning: {plan.stall_problem}"] if plan.stall_problem else []
    lines += ["", "the configured settings, then the fastest settings of each layout that fits:", _row(plan, plan)]
    lines += [_row(other, plan) for other in others] or ["  no layout fits this hardware with this batch"]
    return "\n".join(lines)


def refusal(plan: Plan, hardware: Hardware) -> str:
    """The error for a plan that does not fit: its cause, its size and a remedy."""
    device, rollout = hardware.device.name, plan.rollout
    if rollout is not None and rollout.kv_cache <= 0:
        return (
            f"rollout does not fit: an engine's weights are {rollout.weights:.1f} GiB of each {device}, "
            f"{-rollout.kv_cache:.1f} GiB more than rollout.engine_memory_fraction allows. Raise rollout.engine_tp"
        )
    if rollout is not None and plan.rollouts_gib > plan.device_gib:
        need_gib, what = max((rollout.total, "rollout"), (rollout.syncing, "the weight sync"))
        return (
            f"{what} does not fit: it needs {need_gib:.1f} GiB of each {device}, which has {plan.device_gib:.1f}. "
            "Lower rollout.engine_memory_fraction, set memory.offload_idle, or raise parallel.tp and rollout.engine_tp"
            + (', or set rollout.precision = "fp8"' if rollout.state_requests is None else "")
        )
    parts = asdict(plan.train) | {"engine": plan.training_gib - plan.train.total}
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"training does not fit: it needs {plan.training_gib:.1f} GiB of each {device}, {plan.missing_gib:.1f} GiB "
        f"more than the usable {calibrated('usable_memory') * plan.device_gib:.1f} GiB; the largest part is "
        f"{largest.replace('_', ' ')}, {parts[largest]:.1f} GiB. Use one of the layouts that fit, or more devices"
    )


def _layout(plan: Plan) -> str:
    p, m, config = plan.parallel, plan.memory, plan.config
    experts = f" ep {p.ep} etp {p.expert_tp}" if p.ep > 1 else ""
    recompute = f"{m.recompute} layers per stage" if m.recomputed_layers else m.recompute
    words = [f"tp {p.tp} pp {p.pp} cp {p.cp} dp {plan.dp}{experts}", f"recompute {recompute}"]
    words += [f"adapters of rank {config.lora.rank}"] if config.lora.rank else []
    words += ["base in FP8"] if config.lora.in_fp8 else []
    words += [f"optimizer {m.optimizer_on_cpu:.0%} on the host"] if m.optimizer_on_cpu else []
    words += [f"{plan.micro_batch_tokens} tokens per micro-batch"]
    if isinstance(config, RlConfig):
        r = config.rollout
        words += [f"engines tp {r.engine_tp} with memory fraction {r.engine_memory_fraction:.0%}"]
        words += ["idle actor on the host"] if m.offload_idle else ["idle actor on the device"]
    return ", ".join(words)


def _memory_lines(plan: Plan) -> Iterator[str]:
    yield f"memory of one device, GiB ({calibrated('usable_memory'):.0%} of {plan.device_gib:.1f} is usable)"
    for name, value in asdict(plan.train).items():
        if value:
            yield f"  training   {name.replace('_', ' '):<14}{value:8.1f}"
    if plan.rollout is not None:
        yield f"  training   {'idle engine':<14}{plan.training_gib - plan.train.total:8.1f}"
    yield f"  training   {'total':<14}{plan.training_gib:8.1f}"
    if plan.rollout is not None:
        for name, label in ROLLOUT_PARTS.items():
            if value := getattr(plan.rollout, name):
                yield f"  rollout    {label:<15}{value:7.1f}"
        room = f"KV cache for {plan.rollout.kv_tokens:,} tokens per engine"
        if plan.rollout.state_requests is not None:
            room += f", DeltaNet states for {plan.rollout.state_requests:,} running requests"
        yield f"  rollout    {'total':<14}{plan.rollout.total:8.1f}   {room}"
        if plan.rollout.syncing:
            yield f"  sync       {'total':<14}{plan.rollout.syncing:8.1f}   weights of the actor and an engine"


def _time_lines(plan: Plan) -> Iterator[str]:
    yield f"one step, s ({plan.tokens_per_step:,.0f} tokens)"
    for name, seconds in plan.phases.items():
        yield f"  {name:<25}{seconds:8.1f}"
    yield f"  {'step':<25}{plan.step_s:8.1f}   {plan.steps} steps: {_duration(plan.step_s * plan.steps)}"
    part, seconds = plan.longest_part
    yield f"  {'longest without progress':<25}{seconds:8.1f}   {part}; train.stall_s = {plan.config.train.stall_s:g}"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def _row(plan: Plan, configured: Plan) -> str:
    difference = "configured" if plan is configured else f"{plan.step_s / configured.step_s - 1:+.1%}"
    return f"  {plan.step_s:8.1f} s  {difference:>10}  {plan.need_gib:6.1f} GiB  {_layout(plan)}"
