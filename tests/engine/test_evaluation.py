"""An evaluation runs code in the interpreter of the run's settings."""

import pytest

from retool_mcore.config import load_evaluation
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.cases import EventLoop
from tests.unit.evaluate.test_run import ROOT


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("sandbox.python=/absent/python", "cannot be started"),
        ('sandbox.preload=["absent_module"]', "cannot import"),
    ],
)
async def test_the_code_runs_in_the_interpreter_of_the_settings(setting: str, told: str):
    config = load_evaluation(ROOT / "configs/rl_tiny_cpu.toml", [setting])
    with pytest.raises(ConfigError, match=told):
        await EventLoop(config).open_sandbox()
