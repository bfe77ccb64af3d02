"""Fields of a config.json are applied, harmless or refused by name; tensors have a place."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.data.tool import CALL_END, CALL_START
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.check import check_model
from retool_mcore.model.families import FAMILIES, check_fields, check_window
from retool_mcore.model.shape import shape_of_config
from retool_mcore.model.tensors import missing_tensors, never_trained, trained_tensors

SFT, RL = "configs/sft_tiny_cpu.toml", "configs/rl_tiny_cpu.toml"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def values_of(kind: str, **more: Any) -> dict[str, Any]:
    experts: dict[str, Any] = {}
    if "moe" in kind:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    if kind.startswith("qwen3_5"):
        experts |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 32 if experts else None,
        }  # fmt: skip
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
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    more = {
        "rope_parameters": rope | {"mrope_interleaved": True}, "attn_output_gate": True, "full_attention_interval": 2,
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False, "attention_bias": False,
    }  # fmt: skip
    for kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        check(write(tmp_path / kind, values_of(kind, **more)))
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


@pytest.mark.parametrize(("more", "tokens"), [({"sliding_window": 100}, 100), ({}, 4096)])  # transformers' default
def test_sequences_may_fill_the_sliding_window(more: dict[str, Any], tokens: int):
    values = values_of("mistral")
    del values["sliding_window"]
    check_window(values | more, tokens, "model")
    with pytest.raises(ConfigError, match=f"sliding_window of model is {tokens}"):
        check_window(values | more, tokens + 1, "model")


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
    with pytest.raises(ConfigError, match=r"SGLang ignores these fields .* SFT supports it"):
        check(tmp_path, RlConfig)


def test_a_tensor_that_training_does_not_read_and_one_that_is_missing_are_errors(tmp_path: Path):
    write(tmp_path, values_of("llama"), **{"model.mtp.0.norm.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"has model\.mtp\.0\.norm\.weight, which training would ignore"):
        check(tmp_path)
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


def test_the_tensors_of_a_hybrid_model_are_those_of_its_files():
    norms = {f"{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    delta = {
        "in_proj_qkv.weight": (2 * 16 + 64, 64), "in_proj_z.weight": (64, 64), "in_proj_b.weight": (4, 64),
        "in_proj_a.weight": (4, 64), "conv1d.weight": (96, 1, 4), "A_log": (4,), "dt_bias": (4,), "norm.weight": (16,),
        "out_proj.weight": (64, 64),
    }  # fmt: skip
    attention = {"q_proj": (128, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    attention |= {"q_norm": (16,), "k_norm": (16,)}
    gated = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    experts = {"gate.weight": (4, 64), "experts.gate_up_proj": (4, 96, 64), "experts.down_proj": (4, 64, 48)}
    experts |= {f"shared_expert.{name}.weight": shape for name, shape in gated.items()}
    experts |= {"shared_expert_gate.weight": (1, 64)}
    mlp = norms | {f"mlp.{name}": shape for name, shape in experts.items()}
    layers = (
        mlp | {f"linear_attn.{name}": shape for name, shape in delta.items()},
        mlp | {f"self_attn.{name}.weight": shape for name, shape in attention.items()},
    )
    whole = {"model.embed_tokens.weight": (272, 64), "model.norm.weight": (64,), "lm_head.weight": (272, 64)}
    of_layers = {f"model.layers.{at}.{name}": shape for at, layer in enumerate(layers) for name, shape in layer.items()}
    assert trained_tensors(values_of("qwen3_5_moe_text")) == whole | of_layers


@pytest.mark.parametrize(("model", "command"), [
    ("a/b/Qwen3.5-9B", "`retool data model a/b/Qwen3.5-9B Qwen3.5-9B-text`"),
    ("Qwen/Qwen3.5-9B", "`hf download Qwen/Qwen3.5-9B --local-dir Qwen3.5-9B`, then `retool data model Qwen3.5-9B Q"),
])  # fmt: skip
def test_a_vision_model_is_refused_with_the_command_for_its_text_part(model: str, command: str):
    text = values_of("qwen3_5_text", tie_word_embeddings=False)
    values = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    with pytest.raises(ConfigError) as caught:
        check_fields(values, model)
    assert command in str(caught.value)
    assert shape_of_config(values) == shape_of_config(text | {"tie_word_embeddings": True}), "a plan needs no folder"


def test_the_tensor_names_of_a_vision_model_are_refused_with_the_same_command(tmp_path: Path):
    write(tmp_path, values_of("qwen3_5_text"), **{"model.language_model.norm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"model\.language_model\..*`retool data model .*-text`"):
        check(tmp_path)


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


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rows(alike: range, seed: int = 0, count: int = 600) -> torch.Tensor:
    """Random rows, of which those of ``alike`` differ by a thousandth."""
    drawn = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    drawn[alike.start : alike.stop] = drawn[alike.start] + 0.001 * drawn[alike.start : alike.stop]
    return drawn.to(torch.bfloat16)


def test_a_row_like_more_than_a_hundred_was_never_trained(tmp_path: Path):
    assert never_trained(str(tmp_path), [0]) is None, "no weights, no answer"
    for last, found in ((401, [300, 400]), (400, [])):
        save_file({EMBEDDING: rows(range(300, last))}, tmp_path / "model.safetensors")
        assert never_trained(str(tmp_path), [3, 300, 400, 401]) == found
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="cannot be read"):
        never_trained(str(tmp_path), [0])


def test_the_output_matrix_counts_where_it_is_not_tied_also_in_several_files(tmp_path: Path):
    save_file({EMBEDDING: rows(range(300, 500))}, tmp_path / "a.safetensors")
    save_file({HEAD: rows(range(0, 200), seed=1)}, tmp_path / "b.safetensors")
    index = {"weight_map": {EMBEDDING: "a.safetensors", HEAD: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert never_trained(str(tmp_path), [7, 300]) == [7]


@pytest.mark.parametrize(("trained", "protocol"), [(True, "hermes"), (False, "retool")])
def test_a_model_with_untrained_tags_gets_protocol_retool(tokenizer, tmp_path: Path, trained: bool, protocol: str):
    tokenizer.save_pretrained(tmp_path)
    drawn = rows(range(len(tokenizer), len(tokenizer) + 400), count=len(tokenizer) + 400)
    if not trained:
        for tag in (CALL_START, CALL_END):
            drawn[tokenizer.convert_tokens_to_ids(tag)] = drawn[-1]
    save_file({EMBEDDING: drawn}, tmp_path / "model.safetensors")
    done = CliRunner().invoke(app, ["protocol", str(tmp_path)])
    assert done.exit_code == 0 and done.stdout.strip().splitlines()[-1] == protocol, done.output
    assert ("never trained on" in done.output) is not trained
