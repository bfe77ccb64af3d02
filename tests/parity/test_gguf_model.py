"""A folder that is made from a GGUF file has its weights, tokens and template."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from retool_mcore.data.gguf_model import write_gguf_model
from retool_mcore.data.task_model import TOOL_MARKS
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.errors import CheckpointError
from retool_mcore.model.families import check_fields
from retool_mcore.rollout.protocol import default_protocol
from tests import forked
from tests.unit.data.gguf_file import MODEL_NAME
from tests.unit.data.test_gguf_model import file  # noqa: F401  a fixture

TEXT = 'What is 12 + 7?\n<tool_call>\n{"name": "code_interpreter"}\n</tool_call><|im_end|>\né→ print(1)'


@pytest.fixture(scope="module")
def made(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    done = forked.run("retool_mcore", "data", "model", str(file), str(folder), "--dtype", "float32")
    assert (done.returncode, done.stdout) == (0, f"{folder}: written, float32\n"), done.stderr
    return folder


def test_tokens_template_and_ends_are_the_files(made: Path, tokenizer):
    found, eos, pad = load_tokenizer(str(made)), tokenizer.eos_token_id, tokenizer.pad_token_id
    assert found.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT, add_special_tokens=False)
    assert [len(found.encode(mark, add_special_tokens=False)) for mark in TOOL_MARKS] == [1] * len(TOOL_MARKS)
    assert found.chat_template == tokenizer.chat_template
    assert (found.eos_token_id, found.pad_token_id, found.bos_token) == (eos, pad, None)
    generation = json.loads((made / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([eos, pad], pad)
    assert generation.get("bos_token_id") is None
    assert default_protocol(found) == "hermes"
    values = json.loads((made / "config.json").read_text())
    assert values["_model_name_or_path"] == MODEL_NAME  # transformers' own, from the file
    assert [values.get(f"{name}_token_id") for name in ("eos", "pad", "bos")] == [eos, pad, None]
    check_fields(values, str(made))


def test_weights_are_the_files(made: Path, model_dir: Path):
    own, wanted = (load_file(folder / "model.safetensors") for folder in (made, model_dir))
    assert own.keys() == wanted.keys()
    assert all(own[name].equal(wanted[name]) for name in wanted)


def test_a_whole_folder_stays_and_another_is_refused(made: Path, file: Path):
    assert write_gguf_model(file, made, "float32") is False
    with pytest.raises(CheckpointError, match=r"was not made from .*'dtype': 'bfloat16'.*Name another folder"):
        write_gguf_model(file, made, "bfloat16")
    (made / "gguf.json").unlink()
    with pytest.raises(CheckpointError, match="is not empty"):
        write_gguf_model(file, made, "float32")
    assert (made / "config.json").is_file(), "what the user has there is left as it is"
