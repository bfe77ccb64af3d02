"""An engine's kernels are compiled side by side before it needs them; what fails stops nothing."""

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.numpy import save_file

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms.cuda import kernels_ahead
from retool_mcore.platforms.cuda.kernels_ahead import ARCH_ENV, Kernel, compile_kernels, kernels_of

QWEN = {"hidden_size": 896, "num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 4} | {
    "vocab_size": 151936,
    "intermediate_size": 4864,
}


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's loaders, with ours in their place: two wait for each other."""
    made, meet = ModuleType("sglang.jit_kernel.utils"), threading.Barrier(2)

    def together(seen: list[str]) -> None:
        meet.wait(20)
        seen.append(os.environ[ARCH_ENV])

    def broken() -> None:
        raise RuntimeError("ninja exited with status 1\nnvcc fatal")

    for name, value in {"together": together, "broken": broken}.items():
        setattr(made, name, value)
    made.get_jit_cuda_arch = lambda: SimpleNamespace(target_name="9.0")
    monkeypatch.setitem(sys.modules, "sglang.jit_kernel.utils", made)
    monkeypatch.setenv(ARCH_ENV, "")
    monkeypatch.setattr(kernels_ahead, "TOLD_S", 0.0)
    return made


def loaded(*words: str, path: Path, model: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
    (path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    save_file({}, path / "model.safetensors")
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"model.path={path}", *words])
    return {kernel.loader.removeprefix("sglang.jit_kernel."): kernel.arguments for kernel in kernels_of(config)}


def test_they_are_compiled_at_the_same_time_for_the_devices_kind(
    sglang: ModuleType, capsys: pytest.CaptureFixture[str]
):
    seen: list[str] = []
    compile_kernels([Kernel("sglang.jit_kernel.utils.together", (seen,))] * 2)
    assert seen == ["9.0", "9.0"]
    assert capsys.readouterr().out.count("sglang.jit_kernel.utils 0.") == 2


def test_one_that_fails_or_is_not_there_is_told_in_the_same_line_and_stops_no_other(
    sglang: ModuleType, capsys: pytest.CaptureFixture[str]
):
    seen: list[str] = []
    names = ("utils.together", "utils.broken", "utils.gone", "nowhere.at_all", "utils.together")
    compile_kernels([Kernel(f"sglang.jit_kernel.{name}", (seen,) if "together" in name else ()) for name in names])
    told = capsys.readouterr().out
    assert len(seen) == 2 and told.count("\n") == 1
    assert "utils is left to the engine (RuntimeError: ninja exited with status 1), " in told
    assert told.count("is left to the engine (") == 3


def test_a_sglang_without_such_kernels_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "sglang.jit_kernel.utils", None)  # it cannot be imported
    compile_kernels([Kernel("sglang.jit_kernel.rope.gone")])
    assert capsys.readouterr().out.startswith("the engine's kernels ahead of it: none is compiled (")


def test_they_are_those_of_the_runs_model_and_cache(tmp_path: Path):
    qwen2 = loaded(path=tmp_path, model=QWEN | {"model_type": "qwen2"})
    assert qwen2["rope._jit_fused_rope_module"] == (True, 64, torch.float32)
    assert qwen2["kvcache.can_use_store_cache"] == (4 * 64 * 4,)
    assert "norm.can_use_fused_inplace_qknorm" not in qwen2
    qwen3 = loaded(
        "rollout.engine_tp=2",
        "cluster.gpus_per_node=2",
        path=tmp_path,
        model=QWEN | {"model_type": "qwen3", "head_dim": 128},
    )
    assert qwen3["norm.can_use_fused_inplace_qknorm"] == (128, torch.float32)
    assert qwen3["kvcache.can_use_store_cache"] == (2 * 128 * 4,)


def test_the_cache_in_fp8_has_rows_of_a_byte_a_value(tmp_path: Path):
    words = ("run.platform=cuda", "model.dtype=bfloat16", "rollout.kv_cache=fp8", "algorithm.importance_sampling=token")
    assert loaded(*words, path=tmp_path, model=QWEN)["kvcache.can_use_store_cache"] == (4 * 64,)


def test_flashinfers_norm_is_among_them_where_it_would_use_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_cutlass = ModuleType("cutlass")
    assert "flashinfer.norm.get_norm_module" in loaded(path=tmp_path, model=QWEN)
    with_cutlass.__spec__ = SimpleNamespace()  # type: ignore[assignment]  find_spec gives what is there
    monkeypatch.setitem(sys.modules, "cutlass", with_cutlass)
    assert "flashinfer.norm.get_norm_module" not in loaded(path=tmp_path, model=QWEN)


def test_a_model_that_is_still_to_be_fetched_has_none():
    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", ["model.path=nobody/has-fetched-this"])
    assert not kernels_of(config)
