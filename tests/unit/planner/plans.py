"""Configurations and shapes of the planner's tests."""

from pathlib import Path

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.model.published import PUBLISHED
from retool_mcore.planner.plan import Plan

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
SEVEN, THIRTY_TWO = PUBLISHED["Qwen2.5-7B"], PUBLISHED["Qwen2.5-32B"]
TWO_H200 = ("cluster.gpus_per_node=2", "parallel.tp=1", "parallel.cp=2", "train.micro_batch_tokens=8192",
            "memory.fused_cross_entropy=true", "memory.adam_states=float32", "memory.recompute=none")  # fmt: skip
PLAIN = ("memory.recompute=none", "memory.fused_cross_entropy=false", "memory.adam_states=float32")


def sft(*settings: str) -> SftConfig:
    return load_config(SftConfig, CONFIGS / "sft_qwen2.5_7b_h200x8.toml", settings)


def rl(name: str, *settings: str) -> RlConfig:
    return load_config(RlConfig, CONFIGS / f"{name}.toml", settings)


# How many times its time the host's part of a phase took where so many runs shared one: four had 64
# cores, and two 32, beside which generation took no longer.
ALONE: dict[str, float] = {}
TWO = {"update": 1.32}
FOUR: dict[str, float] = dict.fromkeys(("generate", "update", "weight_sync", "other", "train", "optimizer"), 1.32)


def beside(plan: Plan, host: dict[str, float]) -> dict[str, float]:
    """The phases of a plan whose host is so many times slower."""
    return {name: s + (host.get(name, 1.0) - 1) * plan.host_s.get(name, 0.0) for name, s in plan.phases.items()}
