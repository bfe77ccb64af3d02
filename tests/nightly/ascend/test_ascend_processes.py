"""The Ascend platform with stand-ins for torch_npu, MindSpeed and npu-smi."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend.adapter import Ascend
from retool_mcore.errors import PlatformError
from tests.scenario import ROOT
from tests.unit.ascend.test_ascend_adapter import no_npu

pytest.importorskip("verl", reason="verl is not installed")
# transformers imports torchvision, whose wheel is linked against CUDA: the CPU platform's stub
# stands before it.
PATHS = (ROOT, ROOT / "tests/unit/ascend/standin", ROOT / "retool_mcore/platforms/cpu/stubs")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ours = ("RETOOL_PLATFORM", "VERL_PLATFORM", "TORCHDYNAMO_DISABLE", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    env["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.ascend.npu_scenario"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@no_npu
def test_verl_takes_its_npu_paths(found: dict[str, Any]):
    assert found["verl"] == {
        "device": "npu",
        "backend": "hccl",
        "resource": "NPU",
        "visible_devices": "ASCEND_RT_VISIBLE_DEVICES",
        "engine": "MindspeedEngineWithLMHead",
    }


@no_npu
def test_mindspeed_comes_before_megatron_and_gets_our_settings(found: dict[str, Any]):
    assert found["mindspeed_came_first"]
    wanted = {
        "use_flash_attn": "True",
        "context_parallel_size": "2",
        "recompute_granularity": "full",
        "attention_backend": "AttnBackend.flash",
    }
    assert found["options"] == found["options"] | wanted


@pytest.mark.usefixtures("verl_on_cpu")
@pytest.mark.parametrize(
    ("npu_smi", "cann", "facts"),
    [
        ("echo 'Software Version : 26.0.rc1'", "9.0.0", {"CANN": "9.0.0", "driver": "26.0.rc1"}),
        ("echo 'Software Version : 26.0.rc1'", "8.5.0", r"CANN 8\.5\.0 is installed in .*, but 9\.1 or 9\.0 is needed"),
        ("echo 'Software Version : 25.2.3'", "9.0.0", r"cannot send weights to the engines with version 25\.2\.3"),
        ("echo 'DrvMng failed'; exit 255", "9.0.0", "non-zero exit status 255. DrvMng failed. It reads them again"),
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
