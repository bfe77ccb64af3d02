"""Settings of earlier versions: where each is now, and recorded runs under today's names.

A run file with an old name is refused by a sentence that gives the new one. What a run recorded
itself (its config.toml, a checkpoint's state, a baseline of perf/) is read under today's names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from retool_mcore.config.base import is_table

GONE = "gone: {}. Leave the line out"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Settings that are one now. ``old``: each with the default that it had."""

    old: dict[str, Any]
    new: str
    value: Callable[..., Any]  # of today's setting, given those of ``old`` in their order
    words: str  # what a user writes now

    @property
    def names(self) -> list[str]:
        """The old names that are no setting any more."""
        return [name for name in self.old if name != self.new]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A setting that has one value now. A record with another one keeps its line."""

    old: str
    value: Any
    words: str


def _pair(*values: Any) -> list[Any]:
    return list(values)


def _same(value: Any) -> Any:
    return value


def _which(*kinds: str) -> Callable[..., list[str]]:
    """Of switches that were one setting each, the names of those that are on."""

    def named(*switches: bool) -> list[str]:
        return [kind for kind, on in zip(kinds, switches, strict=True) if on]

    return named


def _layers_or_level(level: str, layers: int) -> str | int:
    return layers if layers and level == "full" else level


def _loss_and_weight(loss: str, weight: float) -> dict[str, float]:
    return {} if loss == "none" else {loss: weight}


def _clip(low: float, high: float, dual: float) -> list[float]:
    return [low, high] if dual == 10.0 else [low, high, dual]


def _filter(on: bool, most: int) -> int:
    return most if on else 0


def _limit(syncs: int, then: str) -> dict[str, int]:
    return {then: syncs}


def _share(kind: str, floor: float) -> float:
    return 1.0 if kind == "off" else floor


def _metric(name: str, mode: str) -> str:
    return name if mode == "auto" or not name else f"{mode} {name}"


def _tools(tool: bool, tools: list[str]) -> list[str]:
    return tools if tool else []


MERGED = (
    Merged(
        old={"data.val_file": ""},
        new="validation.files",
        value=_pair,
        words='files = ["..."] in the section [validation]',
    ),
    Merged(
        old={"train.val_every_steps": 0},
        new="validation.every",
        value=_same,
        words="every = ... in the section [validation]",
    ),
    Merged(
        old={"optim.beta1": 0.9, "optim.beta2": 0.999},
        new="optim.betas",
        value=_pair,
        words="optim.betas = [beta1, beta2]",
    ),
    Merged(
        old={"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.clip_c": 10.0},
        new="algorithm.clip",
        value=_clip,
        words="algorithm.clip = [clip_low, clip_high], or [clip_low, clip_high, clip_c]",
    ),
    Merged(
        old={"algorithm.tau_pos": 1.0, "algorithm.tau_neg": 1.05},
        new="algorithm.tau",
        value=_pair,
        words="algorithm.tau = [tau_pos, tau_neg]",
    ),
    Merged(
        old={"algorithm.importance_low": 0.0, "algorithm.importance_threshold": 2.0},
        new="algorithm.importance_bounds",
        value=_pair,
        words="algorithm.importance_bounds = [importance_low, importance_threshold]",
    ),
    Merged(
        old={"algorithm.rejection_low": 0.0, "algorithm.rejection_high": 0.0},
        new="algorithm.rejection_bounds",
        value=_pair,
        words="algorithm.rejection_bounds = [rejection_low, rejection_high]",
    ),
    Merged(
        old={"algorithm.mask_truncated": False, "algorithm.mask_void_turns": False},
        new="algorithm.mask",
        value=_which("truncated", "void_turns"),
        words='algorithm.mask = ["truncated", "void_turns"], or one of them',
    ),
    Merged(
        old={"memory.recompute": "none", "memory.recompute_layers": 0},
        new="memory.recompute",
        value=_layers_or_level,
        words="memory.recompute = 4, the number of layers to recompute in each pipeline stage",
    ),
    Merged(
        old={"experts.load_balancing": "none", "experts.aux_loss_coef": 0.0},
        new="experts.load_balancing",
        value=_loss_and_weight,
        words="experts.load_balancing = { aux_loss = 0.001 }, the loss and its weight; {}: none",
    ),
    Merged(
        old={"algorithm.filter_groups": False, "rollout.max_refill_batches": 10},
        new="algorithm.filter_groups",
        value=_filter,
        words="algorithm.filter_groups = 10, the most batches of other prompts in a step; 0: off",
    ),
    Merged(
        old={"train.max_staleness": 7, "train.when_stale": "drop"},
        new="train.max_staleness",
        value=_limit,
        words="train.max_staleness = { drop = 7 }, or { wait = 7 }",
    ),
    Merged(
        old={"data.curriculum": "off", "data.curriculum_floor": 0.125},
        new="data.curriculum",
        value=_share,
        words="data.curriculum = 0.125, the least share of epochs that take a prompt; 1.0: off",
    ),
    Merged(
        old={"best.metric": "", "best.mode": "auto"},
        new="best.metric",
        value=_metric,
        words='best.metric = "min NAME" or "max NAME"',
    ),
    Merged(
        old={"best.patience": 0, "best.min_delta": 0.0},
        new="best.patience",
        value=_pair,
        words="best.patience = [validations without a better value, by how much it must be better]",
    ),
    Merged(
        old={"rollout.tool": True, "rollout.tools": ["code_interpreter"]},
        new="rollout.tools",
        value=_tools,
        words="rollout.tools = [], text alone, or a list of what may be called",
    ),
    Merged(
        old={"reward.correct": 1.0, "reward.wrong": -1.0},
        new="reward.answer",
        value=_pair,
        words="reward.answer = [correct, wrong]",
    ),
    Merged(
        old={"reward.call_bonus": 0.0, "reward.call_bonus_cap": -0.6},
        new="reward.call_bonus",
        value=_pair,
        words="reward.call_bonus = [bonus of a call, the highest reward with it]; 0.1 and -0.6 in the public recipe",
    ),
    Merged(
        old={"reward.require_format": False, "reward.require_simplified": False},
        new="reward.require",
        value=_which("format", "simplified"),
        words='reward.require = ["format", "simplified"], or one of them',
    ),
)
DROPPED = (
    Dropped(
        old="experts.router_dtype",
        value="float32",
        words=GONE.format("the router computes in float32, since in bfloat16 the scores of experts are often equal"),
    ),
    Dropped(
        old="experts.permute_fusion",
        value=False,
        words=GONE.format("Megatron's moe_permute_fusion in [verl_overrides] asks for the fused kernels"),
    ),
    Dropped(
        old="critic.clip_value",
        value=0.5,
        words=GONE.format("0.5, or verl's critic.cliprange_value in [verl_overrides]"),
    ),
    Dropped(
        old="rollout.max_malformed_calls",
        value=3,
        words=GONE.format("a trajectory ends at the third malformed call in a row"),
    ),
    Dropped(
        old="rollout.max_tool_s",
        value=300.0,
        words=GONE.format("300 s of running, or sandbox.run_timeout_s in every turn where that is longer"),
    ),
    Dropped(
        old="parallel.sequence_parallel",
        value=True,
        words=GONE.format("it is on where parallel.tp is above 1"),
    ),
    Dropped(
        old="model.bridge",
        value="mbridge",
        words=GONE.format("mbridge is the only bridge, ARCHITECTURE.md says why"),
    ),
)
MOVED = {name: each.words for each in MERGED for name in each.names} | {each.old: each.words for each in DROPPED}
# Settings that kept their name and take another kind of value.
CHANGED = {each.new: each.words for each in MERGED if each.new in each.old}


def under_todays_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """``recorded``, sections of settings, with today's names and forms. What is unknown stays."""
    found = {section: dict(table) if is_table(table) else table for section, table in recorded.items()}
    for each in MERGED:
        if any(_has(found, name) for name in each.names):
            values = [_take(found, name, default) for name, default in each.old.items()]
            section, _, key = each.new.partition(".")
            found.setdefault(section, {})[key] = each.value(*values)
    for each in DROPPED:
        section, _, key = each.old.partition(".")
        if _has(found, each.old) and found[section][key] == each.value:
            del found[section][key]
    return found


def _has(settings: Mapping[str, Any], name: str) -> bool:
    section, _, key = name.partition(".")
    return is_table(settings.get(section)) and key in settings[section]


def _take(settings: dict[str, Any], name: str, default: Any) -> Any:
    section, _, key = name.partition(".")
    table = settings.get(section)
    return table.pop(key, default) if is_table(table) else default
