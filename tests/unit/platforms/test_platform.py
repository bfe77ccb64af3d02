"""Choosing a platform, its facts and commands, its processes' environment, and wrong machines."""

import os
import re
import resource
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascend.adapter import Ascend
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.planner.hardware import DEVICES
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import detect_platform
from retool_mcore.platforms.cpu.platform import STUBS
from retool_mcore.platforms.cuda.platform import KERNELS, Cuda

CORES = os.cpu_count() or 1
RL = load_config(RlConfig, "configs/rl_tiny_cpu.toml")
needs_no_device = pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a device")


@needs_no_device
def test_the_platform_is_that_of_the_machines_devices(monkeypatch: pytest.MonkeyPatch):
    assert detect_platform().name == "cpu"
    with pytest.raises(PlatformError, match=r'run\.platform = "cuda", but torch .* sees no CUDA device'):
        get_platform("cuda").check_machine()
    for kind in (Cuda, Ascend):
        monkeypatch.setattr(kind, "check_machine", lambda self: None)
        assert detect_platform().name == kind.name
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    with pytest.raises(PlatformError, match=r"this process sees an accelerator \(cuda\)"):
        get_platform("cpu").check_machine()


ENVIRONMENT = {  # name -> variables; NAME?: a value that the user exported takes precedence
    "cpu": f"VERL_PLATFORM=cpu PYTHONPATH={STUBS}:{KERNELS}:/theirs SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 "
    "OMP_NUM_THREADS?=1 HF_HUB_OFFLINE?=1 TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT?=30 RAY_USAGE_STATS_ENABLED?=0",
    "cuda": f"VERL_PLATFORM=nvidia PYTHONPATH=/theirs:{STUBS}:{KERNELS} CUDA_DEVICE_MAX_CONNECTIONS?=1 "
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE?=0 NVTE_USE_CUTLASS_GROUPED_GEMM?=1",
    "ascend": "VERL_PLATFORM=huawei VLLM_ASCEND_ENABLE_NZ=0 TASK_QUEUE_ENABLE=1 HCCL_OP_EXPANSION_MODE?=AIV "
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES?=1 HCCL_CONNECT_TIMEOUT?=1800",
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_runs_processes_get_these_variables_of_which_users_may_change_some(name: str, monkeypatch):
    words = f"{ENVIRONMENT[name]} RETOOL_PLATFORM={name} TOKENIZERS_PARALLELISM=false"
    variables = [(each, "?" in sign, value) for each, sign, value in re.findall(r"(\w+)(\??=)(\S+)", words)]
    for theirs in (None, "theirs"):
        for each, _, _ in variables:
            monkeypatch.setenv(each, theirs) if theirs else monkeypatch.delenv(each, raising=False)
        monkeypatch.setenv("PYTHONPATH", f"{KERNELS}:/theirs:{STUBS}")  # as an earlier activation may have left it
        wanted = {each: (free and theirs) or value for each, free, value in variables}
        assert get_platform(name).process_env() == wanted


@needs_no_device
@pytest.mark.parametrize(("hidden", "seen"), [("", ",".join(["-1"] * CORES)), ("7", "7")])
def test_ray_has_logical_gpus_where_all_devices_are_hidden(hidden: str, seen: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    get_platform("cpu").activate()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend"])
def test_a_rank_takes_the_device_of_its_number_and_measures_memory_in_gib(name: str, monkeypatch):
    made: list[Any] = []
    device = SimpleNamespace(set_device=made.append, synchronize=lambda: made.append("waited"))
    device.max_memory_allocated, device.device_count = lambda: 3 * 2**30, lambda: 5
    device.memory = SimpleNamespace(_set_allocator_settings=made.append)
    for module in ("npu", "cuda", "accelerator"):
        monkeypatch.setattr(torch, module, device, raising=False)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3 * 2**20))  # KiB
    (platform := get_platform(name)).set_device(3)
    platform.synchronize()
    calls = {"cpu": [], "cuda": [3, "expandable_segments:True", "waited"], "ascend": [3, "waited"]}[name]
    assert (made, platform.peak_memory_gib()) == (calls, 3.0)
    assert platform.device_count() == (CORES if name == "cpu" else 5)
    planned = {device.flops for device in DEVICES.values() if device.platform == name}
    assert planned == ({platform.device.peak_flops} - {None}), "MFU and plans have the same peak"


def test_an_evaluations_server_gets_these_arguments():
    args = {"cuda_graph_backend_prefill": "full", "x_y": [1, 2], "on": True, "off": False, "table": {"a": 1}}
    options = {"dtype": "bfloat16", "max_running_requests": 64, "tp": 2, "engine_args": args}
    words = "-m sglang.launch_server --host 127.0.0.1 --port 30001 --model-path model --dtype bfloat16 --tp-size 2 "
    words += "--max-running-requests 64 --cuda-graph-backend-prefill full --x-y 1 2 --on --table"
    assert get_platform("cuda").sglang_command("model", 30001, **options)[1:] == [*words.split(), '{"a": 1}']
    assert "--disable-cuda-graph" in get_platform("cpu").sglang_command("model", 30001, **options)


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("rollout", "precision", "fp8", " = 'fp8' needs GPU kernels.* Set it to 'model'"),
        ("model", "fp8", "tensorwise", " = 'tensorwise' needs GPU kernels.* Set it to 'off'"),
        ("memory", "fused_cross_entropy", True, " = True needs GPU kernels.* Set it to False"),
        ("memory", "adam_states", "compact", " = 'compact' needs GPU kernels.* Set it to 'float32'"),
        ("memory", "optimizer_on_cpu", 0.5, " = 0.5 needs GPU kernels.* Set it to 0.0"),
        ("memory", "offload_idle", True, " = True needs GPU kernels.* Set it to False"),
        ("memory", "recompute", "full", None),
        ("cluster", "gpus_per_node", CORES + 1, f" = {CORES + 1} processes would share {CORES} cores"),
        ("cluster", "gpus_per_node", CORES, None),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(section: str, name: str, value: object, message: str | None):
    run = RL.model_copy(update={section: getattr(RL, section).model_copy(update={name: value})})
    with pytest.raises(ConfigError, match=f"{section}.{name}{message}") if message else nullcontext():
        get_platform("cpu").check_settings(run)
        get_platform("cpu").check_room(run)
