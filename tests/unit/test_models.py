"""A run that does not fit its model is refused before anything is loaded."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.config.lora import Lora
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import file_hash, is_hub_name, shape_of_model
from retool_mcore.model.shape import (
    PUBLISHED,
    DeltaShape,
    ModelShape,
    shape_of_config,
    shape_of_hf_config,
    token_memory,
)
from retool_mcore.model.tensors import trained_tensors
from tests.families import FAMILIES, write_hub_cache

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 272,
    "max_position_embeddings": 32768,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "head_dim": 16,
    "moe_intermediate_size": 48, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = MOE | {"num_experts": 16}
HYBRID = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16,
    "full_attention_interval": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
TIED = {"tie_word_embeddings": True, "num_hidden_layers": 4}
LONG = ("data.max_length_tokens=40000", "train.micro_batch_tokens=40000")
DENSE = "parallel.ep=1"
EIGHT = "configs/sft_qwen3_30b_a3b_h200x8.toml"


def write_model(folder: Path, values: dict[str, Any]) -> None:
    """The config.json, and a checkpoint whose tensors have the names that training reads."""
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: np.ones(shape, np.float32) for name, shape in trained_tensors(values).items()}
    save_file(tensors, folder / "model.safetensors")


def check(folder: Path, more: dict[str, Any], *settings: str) -> None:
    write_model(folder, SHAPE | more)
    check_model(load_config(SftConfig, EIGHT, [f"model.path={folder}", *settings]))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])  # as published, as transformers 5 writes it
def test_experts_are_found_by_both_names(tmp_path: Path, name: str):
    longest = ("data.max_length_tokens=32768", "train.micro_batch_tokens=32768")
    check(tmp_path, MOE | {name: 16}, "experts.load_balancing={aux_loss=0.001}", *longest)


@pytest.mark.parametrize(
    ("experts", "settings", "message"),
    [
        ({}, (), r"parallel\.ep = 8 distributes experts, but .* has none"),
        (MOE | {"num_experts": 12}, (), r"parallel\.ep = 8 distributes experts, but .* has 12\. "),
        (EXPERTS, ("parallel.tp=4", "parallel.ep=2"), "parallel.tp = 4 does not divide the 2 key-value heads"),
        ({}, (DENSE, "parallel.tp=8"), "parallel.tp = 8 does not divide the 4 attention heads"),
        ({}, (DENSE, "parallel.pp=8"), "parallel.pp = 8 does not divide the 3 layers"),
        (TIED, (DENSE, "parallel.pp=2", "parallel.vpp=2"), r"parallel\.vpp = 2, but .* has tied embeddings"),
        ({}, (DENSE, "parallel.etp=2"), r"parallel\.etp = 2: .* has no experts"),
        ({}, (DENSE, "experts.load_balancing={aux_loss=0.1}"), r"load_balancing = \{'aux_loss': 0\.1\}: .* has no exp"),
        (EXPERTS | {"moe_intermediate_size": 44}, (DENSE, "parallel.etp=8"), r"etp = 8 does not divide the 44 hidden"),
        (EXPERTS, ("lora.rank=8",), r"lora\.rank = 8, but .* has 16 experts, which cannot have adapters"),
        (HYBRID, (DENSE, "lora.rank=8"), r"lora\.rank = 8, but .* has 2 DeltaNet layers, which cannot have adapters"),
        (HYBRID, (DENSE, "parallel.cp=8"), r"parallel\.tp \* cp = 8 does not divide the 4 key heads of the DeltaNet"),
        (EXPERTS, LONG, r"sequences of 40000 tokens exceed max_position_embeddings = 32768 .*Lower data\.max_len"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_one_error(
    tmp_path: Path, experts: dict[str, Any], settings: tuple[str, ...], message: str
):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, experts, *settings)


def test_router_replay_is_for_experts_and_an_engine_splits_its_heads(tmp_path: Path):
    write_model(tmp_path, SHAPE)
    eight = [f"model.path={tmp_path}", "rollout.engine_tp=8"]
    with pytest.raises(ConfigError, match=r"rollout\.engine_tp = 8 does not divide the 4 attention heads"):
        check_model(load_config(RlConfig, "configs/rl_qwen2.5_7b_h200x8.toml", eight))
    settings = [f"model.path={tmp_path}", "algorithm.router_replay=R2"]
    with pytest.raises(ConfigError, match=r"algorithm\.router_replay = 'R2': .* has no experts"):
        check_model(load_config(RlConfig, "configs/rl_tiny_cpu.toml", settings))


def test_a_shape_is_read_from_its_fields_and_their_defaults():
    dense = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    sizes: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 272}
    assert shape_of_config(dense) == ModelShape(**sizes, kv_heads=4, head_dim=16, ffn=96, tied=False)
    moe = SHAPE | EXPERTS | {"head_dim": 24, "tie_word_embeddings": True}
    assert shape_of_config(moe) == ModelShape(
        **sizes, kv_heads=2, head_dim=24, ffn=48, tied=True, experts=16, experts_per_token=2
    )


def test_parameters_and_memory_by_hand():
    """A layer has 4 * 3 * 2 * 3 = 72 weights in attention, and 60 in its MLP or in an expert."""
    dense = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    moe = replace(dense, experts=6, experts_per_token=2)
    assert (dense.layer_params, moe.layer_params) == (72 + 60, 72 + 6 * 60 + 6 * 4)
    assert (dense.params, replace(dense, tied=True).params) == (2 * 132 + 2 * 28, 2 * 132 + 28)
    assert (dense.compute_params, moe.compute_params) == (2 * 132 + 28, 2 * (72 + 2 * 60 + 6 * 4) + 28)
    assert [dense.engine_bytes(fp8=fp8) for fp8 in (False, True)] == [2 * 320, 2 * 320 - 264]
    assert (dense.largest_matrix, replace(dense, ffn=9).largest_matrix) == (4 * 3 * (2 + 2), 4 * 2 * 9)
    assert dense.adapter_params(2, ["k_proj", "o_proj", "down_proj"], tp=2) == 2 * (4 + 1.5 + 4 + 3 + 4 + 2.5)
    assert (dense.kept_bytes, moe.kept_bytes) == (2 * (8 + 12 + 6 + 15), 2 * (8 + 12 + 6 + 30))
    assert (dense.fp8_values, moe.fp8_values) == (6 + 5, 6 + 10)
    assert [dense.kv_bytes(fp8=fp8) for fp8 in (False, True)] == [24, 12]
    for fused, logit_bytes in ((True, 4), (False, 14)):
        assert token_memory(dense, fused_cross_entropy=fused) == (1 + logit_bytes * 7 / 82, 8 / 82)


HYBRID_DENSE = ModelShape(
    layers=4, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False, output_gate=True,
    delta=DeltaShape(layers=3, key_heads=1, value_heads=2, key_dim=2, value_dim=5, kernel=4),
)  # fmt: skip


def test_a_hybrid_models_parameters_memory_and_flops_by_hand():
    """3 of 4 layers have a DeltaNet of 4 * (2 * 2 + 2 * 10 + 2 * 2 + 10) + 4 * (2 * 2 + 10) weights
    and a state of 2 * 2 * 5 elements, and one has attention with 4 * 3 * (2 * 2 + 2 * 1 + 2).
    """
    dense, delta, mlp = HYBRID_DENSE, 4 * 38 + 56, 60
    moe = replace(dense, experts=6, experts_per_token=2, shared_ffn=3)
    mixers = 3 * delta + 96
    assert dense.params == mixers + 4 * mlp + 2 * 28
    assert moe.params == mixers + 4 * (6 * 60 + 6 * 4 + 3 * 4 * 3 + 4) + 2 * 28
    assert dense.compute_params == mixers + 4 * mlp + 28
    assert moe.compute_params == mixers + 4 * (2 * 60 + 6 * 4 + 3 * 4 * 3 + 4) + 28
    recurrence, squares = 3 * 2 * 4 * 20, 6 * 2 * 3 * (1 + 9)
    assert dense.train_flops([1, 3], Lora()) == (6 * dense.compute_params + 3 * recurrence) * 4 + squares
    attention = 4 * 6 + 2 * 3
    kept = 4 * 2 + 2 * 2 * 2 + 5 * 10 + 64 * 2
    assert dense.kept_bytes == 2 * (8 + (attention + 3 * kept) / 4 + 15)
    assert moe.kept_bytes - dense.kept_bytes == 2 * 3 * (5 + 3)
    assert dense.kv_bytes(fp8=False) == 2 * 3 * 2, "of one layer"
    assert dense.delta and dense.delta.state_bytes == 3 * 4 * (20 + 3 * 14)


def test_a_hybrid_model_counts_the_flops_of_verl():
    """verl also counts the embedding, a lookup, and 5 FLOPs per element of a state, not 8."""
    transformers = pytest.importorskip("transformers")
    from verl.utils.flops_counter import _estimate_qwen3_5_flops

    lengths = [1000, 5000]
    for name, kind in (("Qwen3.5-9B", "Qwen3_5"), ("Qwen3.5-35B-A3B", "Qwen3_5Moe")):
        config, shape = getattr(transformers, f"{kind}TextConfig")(), PUBLISHED[name]
        assert shape_of_hf_config(config) == shape
        theirs = _estimate_qwen3_5_flops(config, sum(lengths), lengths, 1e-12)
        more = 6 * shape.head_params - 3 * shape.recurrence_flops * (1 - 5 / 8)
        assert shape.train_flops(lengths, Lora()) == pytest.approx(theirs - more * sum(lengths), rel=1e-6)


def test_the_shapes_of_published_models_have_their_published_size_and_are_found_by_name(tmp_path: Path):
    qwen25, qwen3 = (494, 1544, 3086, 7616, 14770, 32764, 72706), (596, 1721, 4022, 8191, 14768, 32762, 30532)
    of_names = (8954, 34661)  # by the tensors of transformers' own models
    assert [shape.params / 1e6 for shape in PUBLISHED.values()] == pytest.approx([*qwen25, *qwen3, *of_names], rel=3e-3)
    active = PUBLISHED["Qwen3-30B-A3B"]
    assert active.compute_params + active.head_params == pytest.approx(3.35e9, rel=0.003)
    paths = {
        "runs/sft_qwen2.5_7b/export": "2.5-7B",
        "Qwen/Qwen2.5-72B-Instruct": "2.5-72B",
        "Qwen3.5-9B-text": "3.5-9B",
    }
    for path, name in paths.items():
        assert shape_of_model(path) is PUBLISHED[f"Qwen{name}"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))  # a plan comes before the weights
    assert shape_of_model(str(tmp_path)) == shape_of_config(SHAPE)
    with pytest.raises(ConfigError, match=r"the shape of model\.path = 'runs/mine' is unknown"):
        shape_of_model("runs/mine")
    paths = ("owner/name", "runs/mine", "./mine", "/mine", "a/b/c", "mine")
    assert [path for path in paths if is_hub_name(path)] == ["owner/name"]


def test_a_files_hash_covers_its_size_and_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("retool_mcore.model.files.ENDS_BYTES", 4)
    texts = ("0123456789", "X123456789", "012X456789", "012345X789", "012345678X", "01234_56789")
    hashes = {file_hash(path) for text in texts if (path := tmp_path / text).write_text(text)}
    assert len(hashes) == len(texts)
    assert file_hash(tmp_path / "none") == "missing"


def test_the_tensors_of_a_hub_name_in_the_cache_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "meta-llama/Llama-3.2-1B-Instruct"
    snapshot = write_hub_cache(tmp_path, name)
    run = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"model.path={name}"])
    files = dict.fromkeys(trained_tensors(FAMILIES[name][0]), "model.safetensors")
    for more in ({}, {"model.layers.0.mlp.down_proj.bias": "model.safetensors"}):
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | more}))
        with pytest.raises(CheckpointError, match=r"down_proj\.bias, which training") if more else nullcontext():
            check_model(run)
