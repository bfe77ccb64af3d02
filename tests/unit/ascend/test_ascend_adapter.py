"""Class Ascend on a simulated NPU, through verl's real code, and on a machine that has none."""

import importlib.util
import json
from pathlib import Path

import pytest

from ascend.adapter import Ascend
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CONFIGS = ROOT / "configs"
RECORDED = json.loads((HERE / "names_v0_23_0.json").read_text(encoding="utf-8"))["files"]
no_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
verl_here = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


@pytest.fixture(autouse=True)
def _no_other_platforms_variable(monkeypatch: pytest.MonkeyPatch):
    """Platform cpu, where a test of this process has activated it, sets what RL on NPUs refuses."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@no_npu
def test_a_machine_without_an_npu_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "absent"))
    with pytest.raises(PlatformError, match=r"needs torch_npu, which is not installed \(CANN is not at .*absent"):
        get_platform("ascend").check_machine()


def _verl_sources() -> str:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return "\n".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.py"))


@verl_here
def test_every_variable_occurs_in_the_package_that_reads_it():
    """Ours, verl's and Ray's in the installed sources; the engine's in what was recorded of
    vllm-ascend 0.23.0.
    """
    sources = _verl_sources()
    recorded = {"VLLM_ASCEND_ENABLE_NZ": "code", "HCCL_OP_EXPANSION_MODE": "code", "TASK_QUEUE_ENABLE": "other",
                "HCCL_CONNECT_TIMEOUT": "other"}  # fmt: skip
    read_by_verl = {"VERL_PLATFORM", "TOKENIZERS_PARALLELISM"}
    of_ray = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    ours = {variable.name for variable in Ascend().environment()} - {"RETOOL_PLATFORM"}
    assert ours == {*recorded, *read_by_verl, of_ray}
    assert all(RECORDED[name][kind] > 0 for name, kind in recorded.items())
    assert all(name in sources for name in read_by_verl)
    from ray._private.accelerators import npu

    assert of_ray in Path(str(npu.__file__)).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ASCEND_LAUNCH_BLOCKING", "1", "ASCEND_LAUNCH_BLOCKING = 1"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF"),
        ("TORCHDYNAMO_DISABLE", "1", "piecewise graphs need torch.compile"),
    ],
)
def test_an_exported_variable_that_the_engine_refuses(monkeypatch, name: str, value: str, message: str):
    run = load_config(RlConfig, CONFIGS / "rl_qwen2.5_7b_a2x8.toml")
    monkeypatch.setenv(name, value)
    with pytest.raises(PlatformError, match=message):
        Ascend().check_settings(run)
    # SFT has no engine
    Ascend().check_settings(load_config(SftConfig, CONFIGS / "sft_qwen2.5_7b_a2x8.toml", ["model.path=runs/x"]))


def test_evaluation_on_an_npu_is_refused():
    with pytest.raises(PlatformError, match="retool eval"):
        Ascend().sglang_command("model", 1, dtype="bfloat16", max_running_requests=1)
