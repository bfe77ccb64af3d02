"""A folder that is made from a GGUF file has its weights, tokens and template."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from retool_mcore.data.gguf_model import write_gguf_model
from retool_mcore.data.task_model import TOOL_MARKS
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.errors import CheckpointError
from retool_mcore.model.families import check_fields
from retool_mcore.rollout.protocol import default_protocol
from tests.unit.data.gguf_file import MODEL_NAME
from tests.unit.data.test_gguf_model import file  # noqa: F401  a fixture

TEXT = 'What is 12 + 7?\n<tool_call>\n{"name": "code_interpreter"}\n</tool_call><|im_end|>\né→ print(1)'


@pytest.fixture(scope="module")
def made(file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("made") / "model"
    argv = [sys.executable, "-m", "retool_mcore", "data", "model", str(file), str(folder), "--dtype", "float32"]
    return folder, subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_prints_one_line(made):
    folder, done = made
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}: written, float32\n"


def test_tokens_template_and_ends_are_the_files(made, tokenizer):
    folder, _ = made
    found = load_tokenizer(str(folder))
    assert found.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT, add_special_tokens=False)
    assert [len(found.encode(mark, add_special_tokens=False)) for mark in TOOL_MARKS] == [1] * len(TOOL_MARKS)
    assert found.chat_template == tokenizer.chat_template
    assert (found.eos_token_id, found.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert found.bos_token is None, "the file asks for none"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert (generation["pad_token_id"], generation.get("bos_token_id")) == (tokenizer.pad_token_id, None)
    assert default_protocol(found) == "hermes"


def test_training_takes_the_folder(made):
    values = json.loads((made[0] / "config.json").read_text())
    assert values["_model_name_or_path"] == MODEL_NAME  # transformers' own, from the file
    check_fields(values, str(made[0]))
    ids = load_tokenizer(str(made[0]))
    assert [values.get(f"{name}_token_id") for name in ("eos", "pad", "bos")] == [
        ids.eos_token_id,
        ids.pad_token_id,
        None,
    ]


def test_weights_are_the_files(made, model_dir):
    own, wanted = (load_file(folder / "model.safetensors") for folder in (made[0], model_dir))
    assert own.keys() == wanted.keys()
    assert all(own[name].equal(wanted[name]) for name in wanted)


def test_a_whole_folder_stays_and_another_is_refused(made, file, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made[0], folder)
    assert write_gguf_model(file, folder, "float32") is False
    with pytest.raises(CheckpointError, match=r"was not made from .*'dtype': 'bfloat16'.*Name another folder"):
        write_gguf_model(file, folder, "bfloat16")
    (folder / "gguf.json").unlink()
    with pytest.raises(CheckpointError, match="is not empty"):
        write_gguf_model(file, folder, "float32")
    assert (folder / "config.json").is_file(), "what the user has there is left as it is"
