"""The Ascend platform with stand-ins for torch_npu, MindSpeed and npu-smi."""

import json
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from ascend.adapter import Ascend
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
    assert "cannot start the run" not in found["report"]
    assert "trainer.device: cuda -> npu" in found["report"]
    assert "actor_rollout_ref.rollout.name: ??? -> vllm" in found["report"]
    assert found["device"] == "npu"


@verl_here
@pytest.mark.usefixtures("verl_on_cpu")
@pytest.mark.parametrize(
    ("npu_smi", "cann", "facts"),
    [
        ("echo 'Software Version : 26.0.rc1'", "9.0.0", {"CANN": "9.0.0", "driver": "26.0.rc1"}),
        ("echo 'Software Version : 26.0.rc1'", "8.5.0", r"CANN 8\.5\.0 is installed in .*, but 9\.1 or 9\.0 is needed"),
        ("echo 'Software Version : 25.2.3'", "9.0.0", r"cannot send weights to the engines with version 25\.2\.3"),
        ("echo 'DrvMng failed'; exit 255", "9.0.0", "non-zero exit status 255. DrvMng failed. It reads them again"),
        ("echo nothing", "9.0.0", "Could not find Software Version in npu-smi output"),
    ],
)
def test_the_versions_of_cann_and_its_driver_are_read_as_verl_reads_them(
    npu_smi: str, cann: str, facts: dict[str, str] | str, monkeypatch, tmp_path: Path
):
    (tmp_path / "npu-smi").write_text(f"#!/bin/sh\n{npu_smi}\n")
    (tmp_path / "npu-smi").chmod(0o755)
    info = tmp_path / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={cann}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    if isinstance(facts, dict):
        assert Ascend().facts() == facts
        return
    with pytest.raises(PlatformError, match=facts):
        Ascend().facts()
