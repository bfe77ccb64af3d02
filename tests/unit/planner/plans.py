"""Configurations and shapes of the planner's tests."""

from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.model.shape import PUBLISHED

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
SEVEN, THIRTY_TWO = PUBLISHED["Qwen2.5-7B"], PUBLISHED["Qwen2.5-32B"]


def sft(*settings: str, name: str = "sft_qwen2.5_7b_h200x8") -> SftConfig:
    return load_config(SftConfig, CONFIGS / f"{name}.toml", settings)


def rl(name: str, *settings: str) -> RlConfig:
    return load_config(RlConfig, CONFIGS / f"{name}.toml", settings)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def command(*words: str) -> Done:
    """`retool plan`, in this process."""
    with chdir(ROOT):
        result = CliRunner().invoke(all_commands(), ["plan", *words])
    return Done(result.exit_code, result.stdout, result.stderr)
