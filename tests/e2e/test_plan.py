"""`retool plan` finds the GPU of this machine with nvidia-smi."""

import os
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.planner.hardware import hardware_of_run
from tests.unit.planner.plans import CONFIGS, rl


def test_without_a_name_the_plan_is_for_this_machines_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smi = tmp_path / "nvidia-smi"
    smi.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = load_config(RlConfig, CONFIGS / "rl_gsm8k_gpu1.toml")
    for device, name in (("NVIDIA H200", "h200x1"), ("NVIDIA H100 80GB HBM3", "h100x1")):
        smi.write_text(f"#!/bin/sh\necho '{device}'\n")
        assert hardware_of_run(run).name == name
        assert hardware_of_run(rl("rl_qwen2.5_7b_lora_h100x1")).name == name, "not the GPU that its file names"
        assert hardware_of_run(rl("rl_qwen2.5_32b_h100x16")).name == "h100x16", "of two nodes: not of this machine"
    smi.write_text("#!/bin/sh\necho 'Tesla T4'\n")
    with pytest.raises(ConfigError, match=r"neither the file's name nor run\.name contains the GPU to plan for"):
        hardware_of_run(run)
