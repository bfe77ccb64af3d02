"""`retool data model`: the folder has the file's weights, ids, added tokens, ends and template."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retool_mcore.data.gguf_model import write_gguf_model
from retool_mcore.data.task_model import END_OF_TEXT
from retool_mcore.model.files import dtype_of_weights
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
