"""Configurations and shapes of the planner's tests."""

from pathlib import Path

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.model.shape import PUBLISHED

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
SEVEN, THIRTY_TWO = PUBLISHED["Qwen2.5-7B"], PUBLISHED["Qwen2.5-32B"]


def sft(*settings: str, name: str = "sft_qwen2.5_7b_h200x8") -> SftConfig:
    return load_config(SftConfig, CONFIGS / f"{name}.toml", settings)


def rl(name: str, *settings: str) -> RlConfig:
    return load_config(RlConfig, CONFIGS / f"{name}.toml", settings)
