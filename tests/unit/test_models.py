"""A run that does not fit its model is refused before anything is loaded."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.shape import shape_of_config
from retool_mcore.model.tensors import trained_tensors
from tests.families import FAMILIES, write_hub_cache

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 272,
    "max_position_embeddings": 32768,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "head_dim": 16,
    "moe_intermediate_size": 48, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = MOE | {"num_experts": 16}
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
    check(tmp_path, MOE | {name: 16}, "experts.load_balancing={aux_loss=0.001}")


@pytest.mark.parametrize(
    ("experts", "settings", "message"),
    [
        ({}, (), r"parallel\.ep = 8 distributes experts, but .* has none"),
        (MOE | {"num_experts": 12}, (), r"parallel\.ep = 8 distributes experts, but .* has 12\. "),
        (EXPERTS, ("parallel.tp=4", "parallel.ep=2"), "parallel.tp = 4 does not divide the 2 key-value heads"),
        (
            {},
            (DENSE, "experts.load_balancing={aux_loss=0.1}"),
            r"experts\.load_balancing = \{'aux_loss': 0\.1\}: .* has no experts",
        ),
        (
            EXPERTS | {"moe_intermediate_size": 44},
            ("parallel.ep=1", "parallel.etp=8"),
            r"parallel\.etp = 8 does not divide the 44 hidden units of an expert",
        ),
        (EXPERTS, LONG, "sequences of 40000 tokens exceed max_position_embeddings = 32768"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_one_error(
    tmp_path: Path, experts: dict[str, Any], settings: tuple[str, ...], message: str
):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, experts, *settings)


def test_router_replay_is_for_experts(tmp_path: Path):
    write_model(tmp_path, SHAPE)
    settings = [f"model.path={tmp_path}", "algorithm.router_replay=R2"]
    with pytest.raises(ConfigError, match=r"algorithm\.router_replay = 'R2': .* has no experts"):
        check_model(load_config(RlConfig, "configs/rl_tiny_cpu.toml", settings))


def test_without_a_number_of_key_value_heads_each_head_has_its_own():
    values = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    assert shape_of_config(values).kv_heads == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_shape_gives_its_published_size(name: str):
    values, millions = FAMILIES[name]
    assert shape_of_config(values).params / 1e6 == pytest.approx(millions, rel=0.005)


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
