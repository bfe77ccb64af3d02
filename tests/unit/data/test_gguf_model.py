"""`retool data model`: the folder has the file's weights, ids, added tokens, ends and template."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retool_mcore.data.gguf_model import write_gguf_model
from retool_mcore.data.task_model import END_OF_TEXT
from retool_mcore.errors import DataError, PlatformError
from retool_mcore.model.files import dtype_of_weights
from tests.unit.data.commands import refused
from tests.unit.data.gguf_file import write_gguf

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")


@pytest.fixture(scope="module")
def file(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(model_dir, path)
    return path


def test_a_matrix_quantised_twice_is_tied_and_the_turns_end_counts(model_dir, tmp_path, tokenizer):
    weights = write_gguf(model_dir, tmp_path / "tied.gguf", eos=END_OF_TEXT, output_noise=0.04)
    assert write_gguf_model(tmp_path / "tied.gguf", tmp_path / "model", "bfloat16")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is True
    made = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in made
    assert made["model.embed_tokens.weight"].equal(torch.tensor(weights["lm_head.weight"]).bfloat16()), "of more bits"
    assert dtype_of_weights(tmp_path / "model") == "bfloat16"
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, "<|im_end|>")]
    assert generation["eos_token_id"] == ends  # the file's eos ends a text alone; its eot ends a turn


def test_what_an_interrupted_command_left_is_no_obstacle(file, tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "model").mkdir()
    assert write_gguf_model(file, tmp_path / "model", "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_broken_file_leaves_nothing(file, model_dir, tmp_path):
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:20000])
    (tmp_path / "text.gguf").write_text("no GGUF")
    for name in ("half.gguf", "text.gguf"):
        with pytest.raises(DataError, match=f"{name} cannot be read as GGUF"):
            write_gguf_model(tmp_path / name, tmp_path / "model", "float32")
    write_gguf(model_dir, tmp_path / "other.gguf", pre="falcon")
    with pytest.raises(DataError, match=r"a tokenizer of kind 'gpt2', 'falcon'\. Supported are"):
        write_gguf_model(tmp_path / "other.gguf", tmp_path / "model", "float32")
    with pytest.raises(DataError, match=r"none\.gguf is not a file"):
        write_gguf_model(tmp_path / "none.gguf", tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


def test_without_the_package_it_is_one_line(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # an import then fails as if it were not installed
    with pytest.raises(PlatformError, match=r"pip install 'retool_mcore\[gguf\]'"):
        write_gguf_model(file, tmp_path / "model", "float32")
    output = refused("model", file, tmp_path / "model")
    assert "needs package gguf" in output
