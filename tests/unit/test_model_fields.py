"""Each field of a config.json is applied, harmless or refused by name; each tensor has a place."""

import json
import math
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.families import FAMILIES, check_fields, check_window
from retool_mcore.model.rope import check_engine_rope, rope_of_config
from retool_mcore.model.tensors import missing_tensors, trained_tensors
from retool_mcore.platforms import get_platform

SFT, RL = "configs/sft_tiny_cpu.toml", "configs/rl_tiny_cpu.toml"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def values_of(kind: str, **more: Any) -> dict[str, Any]:
    experts: dict[str, Any] = {}
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return {
        "model_type": kind, "architectures": [FAMILIES[kind].architecture], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": 272, "max_position_embeddings": 32768, "sliding_window": None, **experts, **more,
    }  # fmt: skip


def write(folder: Path, values: dict[str, Any], **tensors: torch.Tensor | None) -> Path:
    """A model directory. ``tensors``: further ones, or None for those that it lacks."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    all_of_them = {name: torch.ones(shape) for name, shape in trained_tensors(values).items()} | tensors
    save_file({name: each for name, each in all_of_them.items() if each is not None}, folder / "model.safetensors")
    return folder


def check(folder: Path, kind: type[SftConfig] | type[RlConfig] = SftConfig, *settings: str) -> None:
    check_model(load_config(kind, RL if kind is RlConfig else SFT, [f"model.path={folder}", *settings]))


REFUSED = tomllib.loads(Path(__file__).with_name("refused_fields.toml").read_text(encoding="utf-8"))["field"]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row['kind']} {' '.join(row['fields'])}")
def test_a_field_that_training_would_ignore_is_refused_by_name(tmp_path: Path, row: dict[str, Any]):
    values = values_of(row["kind"])
    write(tmp_path, values)
    (tmp_path / "config.json").write_text(json.dumps(values | row["fields"]))
    with pytest.raises(ConfigError, match=row["message"]) as caught:
        check(tmp_path)
    assert SFT in str(caught.value) and "\n" not in str(caught.value)


def test_fields_of_published_files_pass(tmp_path: Path):
    more = {"sliding_window": 100, "max_window_layers": 1, "use_sliding_window": False, "use_mrope": False}
    check(write(tmp_path / "qwen2", values_of("qwen2", **more)))
    more = {"sliding_window": 4096, "layer_types": ["full_attention"] * 2, "auto_map": None, "logits_scaling": 1.0}
    check(write(tmp_path / "mistral", values_of("mistral", **more)))
    more = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    check(write(tmp_path / "llama", values_of("llama", **more)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_default_that_only_transformers_knows_must_be_in_the_file(kind: str):
    for name in FAMILIES[kind].needs:
        values = values_of(kind)
        del values[name.split(" or ", maxsplit=1)[0]]
        with pytest.raises(ConfigError, match=rf"lacks {name}\. Only transformers knows the default for {kind}"):
            check_fields(values, "model")
    if kind.startswith("qwen"):
        with pytest.raises(ConfigError, match="head_dim of model is null"):
            check_fields(values_of(kind, head_dim=None), "model")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        YARN,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "beta_fast": 20,
         "beta_slow": 2, "truncate": False, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
         "mscale_all_dim": 0.7},
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
def test_rl_takes_positions_whose_factor_of_attention_is_the_usual_one(scaling: dict[str, Any]):
    get_platform("cpu").activate()  # transformers imports there
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 32768}
    values |= {"rope_theta": 1e6, "rope_scaling": scaling}
    config = LlamaConfig(**json.loads(json.dumps(values)))
    rope = rope_of_config(values)
    assert rope == rope_of_config(config.to_dict()), "the keys of transformers 4 and of 5"
    usual = LlamaRotaryEmbedding(config).attention_scaling == pytest.approx(0.1 * math.log(rope.factor) + 1)
    with nullcontext() if usual else pytest.raises(ConfigError, match="SGLang ignores these fields"):
        check_engine_rope(values)


def test_sequences_may_fill_the_sliding_window():
    values = values_of("mistral", sliding_window=100)
    check_window(values, 100, "model")
    with pytest.raises(ConfigError, match="sliding_window of model is 100"):
        check_window(values, 101, "model")
    del values["sliding_window"]  # transformers has a default
    check_window(values, 4096, "model")
    with pytest.raises(ConfigError, match="sliding_window of model is 4096"):
        check_window(values, 4097, "model")


def test_yarn_reaches_beyond_max_position_embeddings(tmp_path: Path):
    """As Qwen2.5's page writes it. verl and SGLang keep to max_position_embeddings."""
    write(tmp_path, values_of("qwen2", rope_scaling=YARN))
    long = ["data.max_length_tokens=130000", "train.micro_batch_tokens=130000"]
    check(tmp_path, SftConfig, *long)
    response = ["rollout.max_response_tokens=40000", "train.micro_batch_tokens=50000"]
    with pytest.raises(ConfigError, match="Write max_position_embeddings = 131072 and original_max"):
        check(tmp_path, RlConfig, *response)
    write(tmp_path, values_of("qwen2", rope_scaling=YARN) | {"max_position_embeddings": 131072})
    check(tmp_path, RlConfig, *response)
    with pytest.raises(ConfigError, match=r"= 131072 .*Lower data\.max_length_tokens"):  # not four times that
        check(tmp_path, SftConfig, "data.max_length_tokens=140000", "train.micro_batch_tokens=140000")
    with pytest.raises(ConfigError, match=r"Lower data\.max_prompt_tokens or rollout\.max_response_tokens"):
        check(tmp_path, RlConfig, "rollout.max_response_tokens=140000", "train.micro_batch_tokens=150000")
    write(tmp_path, values_of("qwen2", rope_scaling=YARN | {"attention_factor": 1.5}))
    check(tmp_path)
    with pytest.raises(ConfigError, match=r"SGLang ignores these fields .* SFT supports it"):
        check(tmp_path, RlConfig)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj.bias", "model.mtp.0.norm.weight"])
def test_a_tensor_that_training_does_not_read_is_an_error(tmp_path: Path, name: str):
    write(tmp_path, values_of("llama"), **{name: torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"has {name}, which training would ignore"):
        check(tmp_path)


def test_a_tensor_that_is_missing_is_an_error(tmp_path: Path):
    write(tmp_path, values_of("qwen2"), **{"model.layers.0.self_attn.q_proj.bias": None, "lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight, model\.layers\.0\.self_attn\.q_proj\.bias"):
        check(tmp_path)


def test_the_tensors_of_a_family_are_those_of_its_files():
    """Written out, because the checkpoints of the other tests are made from trained_tensors."""
    layer = {
        "input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_proj": (96, 64),
        "self_attn.k_proj": (48, 64), "self_attn.v_proj": (48, 64), "self_attn.o_proj": (64, 96),
        "self_attn.q_norm": (24,), "self_attn.k_norm": (24,), "mlp.gate": (1, 64), "mlp.experts.0.gate_proj": (48, 64),
        "mlp.experts.0.up_proj": (48, 64), "mlp.experts.0.down_proj": (64, 48),
    }  # fmt: skip
    of_layers = {f"model.layers.{at}.{name}.weight": shape for at in (0, 1) for name, shape in layer.items()}
    whole = {"model.embed_tokens.weight": (272, 64), "model.norm.weight": (64,), "lm_head.weight": (272, 64)}
    assert trained_tensors(values_of("qwen3_moe", head_dim=24, num_experts=1)) == whole | of_layers


def test_a_tied_models_second_copy_is_taken_if_it_is_one(tmp_path: Path):
    """As Qwen3-0.6B and Qwen3-1.7B are published; old Llama files have the frequencies, too."""
    rows, old = torch.arange(5000.0)[:, None].repeat(1, 64), "model.layers.0.self_attn.rotary_emb.inv_freq"
    tied = values_of("llama", tie_word_embeddings=True, vocab_size=5000)  # more than are compared at once
    tensors = {"model.embed_tokens.weight": rows, "lm_head.weight": rows.clone(), old: torch.ones(3)}
    check(write(tmp_path, tied, **tensors))
    trained = {name: tensor + 1 for name, tensor in load_file(tmp_path / "model.safetensors").items() if name not in
               {"lm_head.weight", old}}  # fmt: skip
    copies = dict(missing_tensors(tmp_path, trained))
    assert copies.keys() == {"lm_head.weight", old}, "an export has the source's names"
    assert torch.equal(copies["lm_head.weight"], rows + 1) and torch.equal(copies[old], torch.ones(3))
    tensors["lm_head.weight"][4500] = 0.5
    write(tmp_path, tied, **tensors)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings = true .* differs"):
        check(tmp_path)
