"""An export stops by itself: its eos is the token that ends the turns it was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

from retool_mcore.config import SftConfig, load_config
from retool_mcore.config.shared import FORMAT_FILE
from retool_mcore.data.chat import end_of_turn
from retool_mcore.data.prompt_format import PromptFormat, recorded_format
from retool_mcore.data.task_model import END_OF_TEXT, END_OF_TURN
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.run.export import export
from tests.unit.run.test_checkpoints import SFT, save


def values(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def exported(tmp_path: Path, model: Path) -> Path:
    """The export of a run whose checkpoint holds ``model``, trained with its chat template."""
    config = load_config(SftConfig, SFT, [f"run.root={tmp_path}"])

    def write(folder: str, step: int) -> None:
        shutil.copytree(model, Path(folder, "model/huggingface"))

    save(config, 1, write=write)
    PromptFormat().write(config.run.dir, end_of_turn(load_tokenizer(str(model))))
    return export(config.run.dir, tmp_path / "hf")


def test_the_export_of_a_base_model_ends_where_its_template_ends_a_turn(tmp_path: Path, model_dir: Path):
    base = tmp_path / "base"  # its eos is not the token that the chat template ends a turn with
    shutil.copytree(model_dir, base)
    text_end = load_tokenizer(str(model_dir)).convert_tokens_to_ids(END_OF_TEXT)
    for name in ("config.json", "generation_config.json"):
        (base / name).write_text(json.dumps({**values(base / name), "eos_token_id": text_end}))
    settings = {**values(base / "tokenizer_config.json"), "eos_token": END_OF_TEXT}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    made = exported(tmp_path, base)
    tokenizer = load_tokenizer(str(made))
    turn_end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert tokenizer.eos_token == END_OF_TURN
    assert values(made / "config.json")["eos_token_id"] == turn_end
    assert values(made / "generation_config.json")["eos_token_id"] == [turn_end, text_end]
    assert recorded_format(made) == PromptFormat()


def test_a_model_that_knows_the_end_keeps_its_files(tmp_path: Path, model_dir: Path):
    made = exported(tmp_path, model_dir)
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (model_dir / name).read_bytes()
    assert (made / FORMAT_FILE).is_file()
