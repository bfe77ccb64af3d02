"""`retool data model` on a vision model writes its text part, with the tokens of its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.text_model import write_text_model
from retool_mcore.data.tokenizer import from_pretrained
from retool_mcore.errors import CheckpointError
from retool_mcore.model.families import check_fields
from retool_mcore.model.tensors import check_tensors, trained_tensors
from tests.unit.test_model_fields import values_of

SHARDS = [f"model.safetensors-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def as_published(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.language_model.{name.removeprefix('model.')}"


@pytest.fixture(params=["qwen3_5_text", "qwen3_5_moe_text"])
def vision(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A vision model as Qwen3.5 is published: text, image encoder and MTP layer in three files."""
    folder, kind = tmp_path / "vision", request.param
    folder.mkdir()
    values = values_of(kind, eos_token_id=1)
    text = {name: value for name, value in values.items() if name != "architectures"}
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": kind.removesuffix("_text"),
        "text_config": text | {"mtp_num_hidden_layers": 1, "tie_word_embeddings": True, "dtype": "float32"},
        "vision_config": {"depth": 2}, "tie_word_embeddings": False, "image_token_id": 5,
    }))  # fmt: skip
    names = {name: torch.rand(shape) for name, shape in trained_tensors(values).items()}
    parts = (
        {as_published(name): tensor for name, tensor in names.items() if "layers.1" not in name},
        {as_published(name): tensor for name, tensor in names.items() if "layers.1" in name}
        | {"mtp.fc": torch.ones(2)},
        {"model.visual.blocks.0.norm1.weight": torch.ones(3)},
    )
    for file, tensors in zip(SHARDS, parts, strict=True):
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in zip(SHARDS, parts, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_tokenizer(folder: Path) -> None:
    alphabet = ["<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "aa"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("a", "isolated"),  # no class of transformers has this
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "processor_class": "Qwen3VLProcessor", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_layer_types_follow_from_the_interval(vision: Path, tmp_path: Path):
    values = config_of(vision)
    types = values["text_config"].pop("layer_types")
    values["text_config"]["full_attention_interval"] = 2
    (vision / "config.json").write_text(json.dumps(values))
    write_text_model(vision, tmp_path / "text")
    assert config_of(tmp_path / "text")["layer_types"] == types == ["linear_attention", "full_attention"]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_the_folder_is_the_text_part(vision: Path, tmp_path: Path):
    made = tmp_path / "made"
    done = CliRunner().invoke(app, ["model", str(vision), str(made)])
    assert (done.exit_code, done.stdout) == (0, f"{made}: written\n"), done.output
    values = config_of(made)
    check_fields(values, str(made))
    assert not {"text_config", "vision_config", "mtp_num_hidden_layers", "image_token_id"} & values.keys()
    assert (values["tie_word_embeddings"], values["dtype"], values["eos_token_id"]) == (False, "float32", 1)
    found, source = tensors_of(made), tensors_of(vision)
    check_tensors(found, values, str(made))
    assert all(tensor.equal(source[as_published(name)]) for name, tensor in found.items())
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert (index.keys(), {*index.values()}) == (found.keys(), {*SHARDS[:2]}), "no file without tensors"
    others = {path.name for path in made.iterdir() if path.suffix in (".json", ".jinja")}
    config_files = {"config.json", "model.safetensors.index.json", "text_model.json"}
    assert others - config_files == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_its_tokenizer_is_the_whole_file(vision: Path, tmp_path: Path):
    write_text_model(vision, tmp_path / "made")
    tokenizer: Any = from_pretrained(str(tmp_path / "made"))
    whole = Tokenizer.from_file(str(vision / "tokenizer.json"))
    assert tokenizer.encode("baab") == whole.encode("baab").ids and len(tokenizer.encode("baab")) == 4
    assert tokenizer.eos_token == "<|im_end|>"


def test_it_is_made_once_and_from_what_transformers_saves_of_it_too(vision: Path, tmp_path: Path):
    made, saved = tmp_path / "made", tmp_path / "saved"
    assert write_text_model(vision, made) and not write_text_model(vision, made)
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(config_of(made)))
    source = tensors_of(vision)
    save_file({name: source[name] for name in map(as_published, tensors_of(made))}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not empty and was not made from"):
        write_text_model(saved, made)
    assert write_text_model(saved, tmp_path / "again")
    assert tensors_of(tmp_path / "again").keys() == tensors_of(made).keys()


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"model_type": "gemma3"}, (), "takes a GGUF file, or the folder of a vision model with model_type qwen3_5 or"),
        ({}, ("--dtype", "float32"), "--dtype float32 is for GGUF files"),
    ],
)
def test_what_is_no_vision_model_is_refused(
    vision: Path, tmp_path: Path, change: dict[str, str], words: tuple[str, ...], message: str
):
    (vision / "config.json").write_text(json.dumps(config_of(vision) | change))
    done = CliRunner().invoke(app, ["model", str(vision), str(tmp_path / "made"), *words])
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "made").exists()
