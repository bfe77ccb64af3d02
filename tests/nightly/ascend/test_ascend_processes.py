"""The Ascend platform with stand-ins for torch_npu, MindSpeed and npu-smi."""

import contextlib
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from ascend.adapter import driver_version
from retool_mcore.errors import PlatformError
from tests.unit.ascend.test_ascend_adapter import (
    HERE,
    ROOT,
    _no_other_platforms_variable,  # noqa: F401  a fixture
    no_npu,
    verl_here,
)

STANDIN = HERE / "standin"


# transformers imports torchvision, whose wheel is linked against CUDA: the CPU platform's stub
# stands before it.
STUBS = ROOT / "retool_mcore" / "platforms" / "cpu" / "stubs"


@lru_cache
def scenario(name: str) -> dict[str, Any]:
    ours = ("RETOOL_PLATFORM", "VERL_PLATFORM", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, STANDIN, STUBS)))
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.ascend.npu_scenario", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@verl_here
@no_npu
def test_verl_takes_its_npu_paths_and_nothing_runs_on_the_device():
    found = scenario("activated")
    assert (found["device"], found["backend"], found["resource"]) == ("npu", "hccl", "NPU")
    assert found["visible_devices"] == "ASCEND_RT_VISIBLE_DEVICES"
    assert found["engine"] == "MindspeedEngineWithLMHead"
    assert found["peak_gib"] == 3.0
    questions = ("is_available", "device_count", "current_device", "get_device", "_is_in_bad_fork", "is_initialized")
    ours = {"set_device(3,)", "synchronize()", "max_memory_allocated()"}
    assert ours <= set(found["calls"])
    assert all(call.startswith(questions) for call in set(found["calls"]) - ours), found["calls"]


@verl_here
@no_npu
def test_mindspeed_patches_before_megatron_is_imported():
    assert scenario("activated")["mindspeed_came_first"]
    assert "megatron.core was imported before" in scenario("late")["error"]


@verl_here
@no_npu
def test_verls_engine_hands_our_settings_to_mindspeed():
    options = scenario("repatched")
    assert options["use_flash_attn"] == "True"
    assert options["context_parallel_size"] == "2"
    assert options["recompute_granularity"] == "full"
    assert options["attention_backend"] == "AttnBackend.flash"


@verl_here
@no_npu
def test_the_dry_run_on_a_device_reports_no_missing_device():
    found = scenario("dry_run")
    assert "cannot start it" not in found["report"]
    assert "trainer.device: cuda -> npu" in found["report"]
    assert "actor_rollout_ref.rollout.name: ??? -> vllm" in found["report"]
    assert found["device"] == "npu"


def npu_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on the path, and no other."""
    (folder / "npu-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


BOARD = 'echo "\tNPU ID                         : $5"; echo "\tSoftware Version               : {}"'


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (BOARD.format("25.2.3"), "the driver's version is 25.2.3, but verl needs at least 25.3.rc1"),
        (BOARD.format("unknown"), "the driver's version is unknown, but verl needs"),
        ("echo 'DrvMngGetConsoleLogLevel failed'; exit 255", r"-i 1` failed with 255: DrvMng.*\. verl runs the same"),
        ("echo nothing", "prints no Software Version"),
    ],
)
def test_an_unusable_answer_of_npu_smi_is_an_error(script: str, message: str, monkeypatch, tmp_path: Path):
    """verl runs it when the engines start, and raises "Error checking IPC support"."""
    npu_smi(tmp_path, script, monkeypatch)
    with pytest.raises(PlatformError, match=message):
        driver_version()


@pytest.mark.parametrize(("visible", "answers"), [("4,5", True), ("9", True), ("", False)])
def test_a_container_without_card_1_uses_another(visible: str, answers: bool, monkeypatch, tmp_path: Path):
    """Only card 4 answers: 4 by its own number, 9 as the second die of it."""
    npu_smi(tmp_path, f'[ "$5" = 4 ] || exit 1; {BOARD.format("25.5.0")}', monkeypatch)
    monkeypatch.setenv("ASCEND_VISIBLE_DEVICES", visible)
    with contextlib.nullcontext() if answers else pytest.raises(PlatformError, match="ASCEND_VISIBLE_DEVICES"):
        assert driver_version() == "25.5.0"
