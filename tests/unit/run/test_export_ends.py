"""An export stops by itself: its eos is the token that ends the turns it was trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from retool_mcore.config import SftConfig, load_config
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data.chat import end_of_turn
from retool_mcore.data.prompt_format import PromptFormat, recorded_format
from retool_mcore.data.task_model import END_OF_TEXT, END_OF_TURN
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.run import checkpoint
from retool_mcore.run.export import export

CONFIG = Path(__file__).parents[3] / "configs" / "sft_tiny_cpu.toml"


def values(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def exported(tmp_path: Path, model: Path) -> Path:
    """The export of a run whose checkpoint holds ``model``, trained with its chat template."""
    config = load_config(SftConfig, CONFIG, [f"run.root={tmp_path}"])

    def write(folder: str, step: int) -> None:
        saved = Path(folder) / "model" / "huggingface"
        saved.mkdir(parents=True)
        for file in model.iterdir():
            (saved / file.name).write_bytes(file.read_bytes())

    with checkpoint.Saver(config, write) as saver:
        saver.save(1)
    PromptFormat().write(config.run.dir, end_of_turn(load_tokenizer(str(model))))
    return export(config.run.dir, tmp_path / "hf")


@pytest.fixture
def base(model_dir: Path, tmp_path: Path) -> Path:
    """As a base model is: its eos is not the token that the chat template ends a turn with."""
    tokenizer = load_tokenizer(str(model_dir))
    folder = tmp_path / "base"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    text_end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**values(folder / name), "eos_token_id": text_end}))
    settings = {**values(folder / "tokenizer_config.json"), "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    says_only(folder, tokenizer.convert_tokens_to_ids(END_OF_TURN))
    return folder


def says_only(folder: Path, token_id: int) -> None:
    """Let the model say one token, whatever it has read: all hidden states are alike."""
    weights = {name: weight.clone() for name, weight in load_file(folder / "model.safetensors").items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            weight.fill_(1)[token_id] = 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_the_export_of_a_base_model_ends_where_its_template_ends_a_turn(tmp_path: Path, base: Path):
    made = exported(tmp_path, base)
    tokenizer = load_tokenizer(str(made))
    turn_end, text_end = (tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TURN, END_OF_TEXT))
    assert tokenizer.eos_token == END_OF_TURN
    assert values(made / "config.json")["eos_token_id"] == turn_end
    assert values(made / "generation_config.json")["eos_token_id"] == [turn_end, text_end]
    assert recorded_format(made) == PromptFormat()


def test_a_model_that_knows_the_end_keeps_its_files(tmp_path: Path, model_dir: Path):
    made = exported(tmp_path, model_dir)
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (model_dir / name).read_bytes()
    assert (made / FORMAT_FILE).is_file()
