"""Class Ascend on a machine without an NPU, and the settings and variables that it refuses."""

import importlib.util
import json
import subprocess
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

from ascend.adapter import Ascend
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms import get_platform
from tests.families import write_hub_cache

CONFIGS = Path(__file__).parents[3] / "configs"
RL, SFT = CONFIGS / "rl_qwen2.5_7b_a2x8.toml", CONFIGS / "sft_qwen2.5_7b_a2x8.toml"
no_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")


@no_npu
def test_a_machine_without_an_npu_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "absent"))
    with pytest.raises(PlatformError, match=r"needs torch_npu, which is not installed \(CANN is not at .*absent"):
        get_platform("ascend").check_machine()


@pytest.mark.parametrize(
    ("driver", "cann", "problem"),
    [
        ("26.0.rc1", "9.0.0", ""),
        ("26.0.rc1", "8.5.0", r"CANN 8\.5\.0 is installed in .*, but 9\.1 or 9\.0 is needed"),
        ("25.2.3", "9.0.0", r"cannot send weights to the engines with version 25\.2\.3"),
        ("", "", "non-zero exit status 255. DrvMng failed. It reads them again"),
    ],
)
def test_the_versions_of_cann_and_its_driver_must_fit(
    verl_on_cpu: None, driver: str, cann: str, problem: str, monkeypatch: pytest.MonkeyPatch
):
    from verl.utils import device

    def versions() -> tuple[None, str, str]:
        if not driver:
            raise subprocess.CalledProcessError(255, "npu-smi", "DrvMng failed\n")
        return None, driver, cann

    monkeypatch.setattr(device, "get_npu_versions", versions)
    with pytest.raises(PlatformError, match=problem) if problem else nullcontext():
        assert Ascend().facts() == {"CANN": cann, "driver": driver}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ASCEND_LAUNCH_BLOCKING", "1", "ASCEND_LAUNCH_BLOCKING = 1"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF"),
        ("TORCHDYNAMO_DISABLE", "1", "piecewise graphs need torch.compile"),
    ],
)
def test_an_exported_variable_that_the_engine_refuses(monkeypatch, name: str, value: str, message: str):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # which platform cpu sets
    monkeypatch.setenv(name, value)
    with pytest.raises(PlatformError, match=message):
        Ascend().check_settings(load_config(RlConfig, RL))
    # SFT has no engine
    Ascend().check_settings(load_config(SftConfig, SFT, ["model.path=runs/x"]))


def test_scaled_positions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "meta-llama/Llama-3.2-1B-Instruct"
    write_hub_cache(tmp_path, name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{name} has RoPE scaling of type llama3, which is not tested"):
        Ascend().check_settings(load_config(RlConfig, RL, [f"model.path={name}"]))


def test_evaluation_on_an_npu_is_refused():
    with pytest.raises(PlatformError, match="retool eval"):
        Ascend().sglang_command("model", 1, dtype="bfloat16", max_running_requests=1)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_every_variable_occurs_in_the_package_that_reads_it():
    """verl's and Ray's in the installed sources; vllm-ascend's in what was recorded of 0.23.0."""
    recorded = json.loads(Path(__file__).with_name("names_v0_23_0.json").read_text(encoding="utf-8"))["files"]
    kinds = {"VLLM_ASCEND_ENABLE_NZ": "code", "HCCL_OP_EXPANSION_MODE": "code", "TASK_QUEUE_ENABLE": "other"}
    kinds["HCCL_CONNECT_TIMEOUT"] = "other"
    of_ray, of_verl = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", {"VERL_PLATFORM", "TOKENIZERS_PARALLELISM"}
    ours = {variable.name for variable in Ascend().environment()} - {"RETOOL_PLATFORM"}
    assert ours == {*kinds, *of_verl, of_ray}
    assert all(recorded[name][kind] > 0 for name, kind in kinds.items())
    verl, ray = (
        "\n".join(
            file.read_text(encoding="utf-8") for file in Path(str(import_module(name).__file__)).parent.rglob("*.py")
        )
        for name in ("verl", "ray._private.accelerators")
    )
    assert all(name in verl for name in of_verl) and of_ray in ray
