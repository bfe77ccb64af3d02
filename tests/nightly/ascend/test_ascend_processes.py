"""The Ascend platform with stand-ins for torch_npu and MindSpeed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.scenario import ROOT
from tests.unit.ascend.test_ascend_adapter import no_npu

pytestmark = no_npu
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


def test_verl_takes_its_npu_paths(found: dict[str, Any]):
    assert found["verl"] == {
        "device": "npu",
        "backend": "hccl",
        "resource": "NPU",
        "visible_devices": "ASCEND_RT_VISIBLE_DEVICES",
        "engine": "MindspeedEngineWithLMHead",
    }


def test_mindspeed_comes_before_megatron_and_gets_our_settings(found: dict[str, Any]):
    assert found["mindspeed_came_first"]
    wanted = {
        "use_flash_attn": "True",
        "context_parallel_size": "2",
        "recompute_granularity": "full",
        "attention_backend": "AttnBackend.flash",
    }
    assert found["options"] == found["options"] | wanted


def test_a_training_process_checks_the_tensors_of_a_checkpoint(found: dict[str, Any]):
    assert found["checks_tensors"]
