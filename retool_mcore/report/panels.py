"""The charts of a report: the metrics, title and unit of each.

run/metric_table.py and rollout/metrics.py define the metrics.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: metrics over steps. ``lines``: pairs of metric and legend label."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    from_zero: bool = True
    least: float = 0.0  # minimum range of the y axis
    kinds: tuple[str, ...] = ("sft", "rl")  # kinds of runs that have this chart


RL = ("rl",)


def _one(
    title: str,
    unit: str,
    metric: str,
    *,
    from_zero: bool = True,
    least: float = 0.0,
    kinds: tuple[str, ...] = ("sft", "rl"),
) -> Panel:
    return Panel(title=title, unit=unit, lines=((metric, ""),), from_zero=from_zero, least=least, kinds=kinds)


LEARNING = (
    Panel(
        title="Accuracy",
        unit="share of answers",
        lines=(("accuracy", "train"), ("val/accuracy", "validation")),
        least=0.1,
        kinds=RL,
    ),
    _one("Reward", "mean", "critic/rewards/mean", from_zero=False, least=0.1, kinds=RL),
    Panel(
        title="Loss",
        unit="nats per token",
        lines=(("loss", "train"), ("val_loss", "validation")),
        kinds=("sft",),
    ),
    _one("Policy loss", "mean of the updates", "actor/pg_loss", from_zero=False, least=0.01, kinds=RL),
    _one("Entropy", "nats per token", "actor/entropy", kinds=RL),
    _one("Gradient norm", "before clipping", "grad_norm", kinds=("sft",)),
    _one("Gradient norm", "before clipping", "actor/grad_norm", kinds=RL),
    _one("Learning rate", "last update", "lr", kinds=("sft",)),
    _one("Learning rate", "last update", "actor/lr", kinds=RL),
    Panel(
        title="Mismatch of engine and actor",
        unit="log-probability gap, nats",
        lines=(("mismatch/p99", "99th percentile"), ("mismatch/max", "largest")),
        least=1e-3,
        kinds=RL,
    ),
    Panel(
        title="Groups without learning signal",
        unit="share of groups",
        lines=(
            ("groups/all_right", "all right"),
            ("groups/all_wrong", "all wrong"),
            ("groups/same_reward", "same reward"),
        ),
        least=0.1,
        kinds=RL,
    ),
)
BEHAVIOUR = (
    _one("Code ratio", "trajectories with a call", "behavior/code_ratio", kinds=RL),
    _one("Lines of code", "per call", "behavior/code_lines", kinds=RL),
    _one("Code pass rate", "calls that ran", "behavior/executable_fraction", kinds=RL),
    _one("Right with working code", "share of trajectories with a call", "behavior/correct_code_fraction", kinds=RL),
    _one("Position of the first call", "share of the response", "behavior/first_call_position", kinds=RL),
    _one("Response length", "tokens", "response_length/mean", kinds=RL),
    _one("Self-corrections", "per trajectory", "behavior/self_corrections", kinds=RL),
    _one("Calls", "per trajectory", "behavior/calls", kinds=RL),
)
SPEED = (
    _one("Throughput", "tokens per second", "tokens_per_s"),
    _one("MFU", "share of the device's peak FLOP/s", "mfu"),
    _one("Time per step", "s", "timing_s/step"),
    _one("Memory", "GiB, highest so far on any rank", "memory_gib"),
)
