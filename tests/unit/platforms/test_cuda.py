"""Platform cuda: its patches, compared with the originals, and the settings that it refuses."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import SftConfig, load_config, load_run
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import PREFILLS_ENV
from retool_mcore.platforms.cuda import patches, platform
from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.patches_sglang import HOST_COPY_PATCH
from retool_mcore.platforms.patches_verl import CHUNK_PATCH, FLAT_BUCKET_PATCH, LOG_PROB_PATCH

ABSENT, INSTALLED = "a_package_that_is_not_there", "json"


class OneStep:
    """An optimizer with FusedAdam's attributes that records the parameters of each step."""

    def __init__(self, moments: torch.dtype) -> None:
        self.name_to_dtype_map = {"exp_avg": moments, "exp_avg_sq": moments}
        self.param_groups: list[dict[str, Any]] = [
            {"params": [torch.zeros(2), torch.zeros(1), torch.zeros(3)]},
            {"params": [torch.zeros(2)], "step": 7},
        ]
        self.seen: list[tuple[int, int]] = []

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        assert grad_scaler == "a scaler"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.seen.append((sum(p.numel() for p in group["params"]), group["step"]))
        return closure and closure()


@pytest.mark.parametrize(
    ("moments", "seen"),
    [(torch.float32, [(6, 1), (2, 8)]), (torch.bfloat16, [(3, 1), (3, 1), (2, 8)])],
)
def test_a_step_in_parts_counts_one_step_and_restores_the_groups(
    moments: torch.dtype, seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patches, "PART_ELEMENTS", 3)
    optimizer = OneStep(moments)
    groups, sizes = optimizer.param_groups, [len(group["params"]) for group in optimizer.param_groups]
    assert patches.step_in_parts(OneStep.step)(optimizer, lambda: 0.5, "a scaler") == 0.5
    assert optimizer.seen == seen
    assert optimizer.param_groups is groups and [len(group["params"]) for group in groups] == sizes
    assert [group["step"] for group in groups] == [1, 8]


@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_float32_is_refused_without_the_cpu(name: str):
    config = load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"run.platform={name}"])
    with pytest.raises(ConfigError, match=rf'model\.dtype = "float32" is not supported on platform "{name}". Use "b'):
        get_platform(name).check_settings(config)


def test_settings_that_need_transformer_engine_are_refused_without_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "TRANSFORMER_ENGINE", ABSENT)
    path, settings = "configs/sft_qwen2.5_7b_h200x8.toml", ["memory.adam_states=compact", "model.fp8=tensorwise"]
    config = load_config(SftConfig, path, ["parallel.cp=2", *settings])
    names = r"parallel\.cp and model\.fp8 and memory\.adam_states"
    with pytest.raises(PlatformError, match=f"value of {names} needs Transformer Engine"):
        get_platform("cuda").check_settings(config)
    get_platform("cuda").check_settings(load_config(SftConfig, path, ["parallel.cp=1", "memory.recompute=auto"]))


IN_FP8 = ("rollout.precision=fp8", "algorithm.importance_sampling=token")


@pytest.mark.parametrize(
    ("name", "settings", "deep_gemm", "warning"),
    [
        ("rl_qwen2.5_7b", IN_FP8, ABSENT, "no DeepGEMM installed"),
        ("rl_qwen2.5_7b", IN_FP8, INSTALLED, ""),
        ("rl_qwen2.5_7b", (*IN_FP8, "rollout.engine_args={fp8_gemm_runner_backend='cutlass'}"), INSTALLED, "CUTLASS"),
        ("rl_qwen2.5_7b", (*IN_FP8, "rollout.engine_args={fp8_gemm_runner_backend='triton'}"), ABSENT, ""),
        ("sft_qwen3_30b_a3b", ("model.fp8=tensorwise", "parallel.ep=8"), ABSENT, "train slower than in bfloat16"),
        ("sft_qwen3_30b_a3b", ("model.fp8=tensorwise", "parallel.ep=1"), ABSENT, ""),
        ("sft_qwen3_30b_a3b", ("parallel.ep=8",), ABSENT, ""),
    ],
)
def test_fp8_that_is_no_faster_gets_a_warning(
    name: str, settings: Sequence[str], deep_gemm: str, warning: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platform, "DEEP_GEMM", deep_gemm)
    remarks = get_platform("cuda").remarks(load_run(f"configs/{name}_h200x8.toml", settings))
    assert len(remarks) == bool(warning) and warning in "".join(remarks)


@pytest.mark.parametrize("patch", [LOG_PROB_PATCH, FLAT_BUCKET_PATCH, HOST_COPY_PATCH], ids=lambda patch: patch.title)
def test_patches_of_cuda_alone_fit_the_installed_packages(verl_on_cpu: None, patch: Patch):
    patch.check_version()
    for change in patch.changes:
        patch.check_parameters(change.target, change.parameters)


def test_each_process_gets_the_patches_that_it_needs(monkeypatch: pytest.MonkeyPatch):
    def names(patches: Sequence[Patch]) -> list[str]:
        return [patch.changes[0].target.rpartition(".")[2] for patch in patches]

    monkeypatch.setattr(platform, "TRANSFORMER_ENGINE", INSTALLED)
    monkeypatch.delenv(PREFILLS_ENV, raising=False)
    of_verl = ["index_select_tensor_dict", "prepare_micro_batches", "register_megatron_training_hooks"]
    of_bridge = ["_build_tf_config", "async_save"]
    training = [*of_verl, *of_bridge, "linear_cross_entropy", "step"]
    sglang = ["region", "get_new_batch_prefill", "_check_token_based_finish", "handle", "_CONFIG_REGISTRY"]
    assert (names(Cuda().training_patches()), names(Cuda().sglang_patches())) == (training, sglang)
    assert names(Cuda().weight_sync_patches()) == ["sgl_update_weights"]
    region = HOST_COPY_PATCH.changes[0].replace(lambda adapter, tag, enable_cpu_backup=False: (tag, enable_cpu_backup))
    assert region(None, "weights", enable_cpu_backup=True) == ("weights", False), "an engine that sleeps copies nothing"


@pytest.mark.parametrize(
    ("visible", "second", "busy"), [("", "1", "1"), ("0,5", "5", ""), ("GPU-0,5", "5", ""), ("MIG-0,5", "5", "1")]
)
def test_servers_get_visible_devices_and_only_these_must_be_free(
    visible: str, second: str, busy: str, monkeypatch: pytest.MonkeyPatch
):
    rows = ["0, GPU-0a, NVIDIA H200, 580.159.04, 8630, 143771", "1, GPU-1b, NVIDIA H200, 580.159.04, 94606, 143771"]
    listed = SimpleNamespace(returncode=0, stdout="\n".join(rows), stderr="")
    monkeypatch.setattr(platform.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(platform.subprocess, "run", lambda *_, **__: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert get_platform("cuda").only_devices([1]) == {"CUDA_VISIBLE_DEVICES": second}
    if busy:
        with pytest.raises(PlatformError, match=rf"use most of the memory of GPU {busy} \(94606 of 143771 MiB\)"):
            platform._driver()
    else:
        assert platform._driver() == "580.159.04, 1 x NVIDIA H200"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("set_by_verl", ["of the first", None])  # None: gradients are reduced after the backward pass
def test_interleaved_chunks_begin_their_gradients_reduction_each(count: int, set_by_verl: str | None):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    config = SimpleNamespace(no_sync_func="of the first", grad_sync_func=set_by_verl)
    chunks = [SimpleNamespace(config=config, no_sync=number, start_grad_sync=-number) for number in range(count)]
    (change,) = CHUNK_PATCH.changes
    given: list[Any] = []
    change.replace(lambda model, optimizer: given.extend((model, optimizer)))(chunks, "optimizer")
    assert given == [chunks[:1], "optimizer"]
    assert config.no_sync_func == ("of the first" if count == 1 else [0, 1])
    assert config.grad_sync_func == (set_by_verl if count == 1 or not set_by_verl else [0, -1])
