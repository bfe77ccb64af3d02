"""Tokens that a model has never trained, by its weights, and the protocol that they rule out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.tool import CALL_END, CALL_START
from retool_mcore.errors import CheckpointError
from retool_mcore.model.tensors import never_trained

ROWS, WIDTH = 600, 16


def rows(alike: range, seed: int = 0) -> torch.Tensor:
    """Random rows, of which those of ``alike`` differ by a thousandth."""
    drawn = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    drawn[alike.start : alike.stop] = drawn[alike.start] + 0.001 * drawn[alike.start : alike.stop]
    return drawn.to(torch.bfloat16)


def test_a_row_like_more_than_a_hundred_was_never_trained(tmp_path: Path):
    save_file({"model.embed_tokens.weight": rows(range(300, 401))}, tmp_path / "model.safetensors")
    assert never_trained(str(tmp_path), [3, 300, 400, 401]) == [300, 400]
    save_file({"model.embed_tokens.weight": rows(range(300, 400))}, tmp_path / "model.safetensors")
    assert never_trained(str(tmp_path), [3, 300, 399]) == []


def test_the_output_matrix_counts_where_it_is_not_tied_also_in_several_files(tmp_path: Path):
    save_file({"model.embed_tokens.weight": rows(range(300, 500))}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": rows(range(0, 200), seed=1)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert never_trained(str(tmp_path), [7, 300]) == [7]


def test_weights_that_cannot_be_read_are_one_error(tmp_path: Path):
    assert never_trained(str(tmp_path), [0]) is None, "no weights, no answer"
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="cannot be read"):
        never_trained(str(tmp_path), [0])


@pytest.mark.parametrize(("trained", "protocol"), [(True, "hermes"), (False, "retool")])
def test_a_model_with_untrained_tags_gets_protocol_retool(tokenizer, tmp_path: Path, trained: bool, protocol: str):
    tokenizer.save_pretrained(tmp_path)
    drawn = torch.randn(len(tokenizer) + 400, WIDTH, generator=torch.Generator().manual_seed(0))
    drawn[len(tokenizer) :] = drawn[-1]
    if not trained:
        for tag in (CALL_START, CALL_END):
            drawn[tokenizer.convert_tokens_to_ids(tag)] = drawn[-1]
    save_file({"model.embed_tokens.weight": drawn}, tmp_path / "model.safetensors")
    done = CliRunner().invoke(app, ["protocol", str(tmp_path)])
    assert done.exit_code == 0 and done.stdout.strip().splitlines()[-1] == protocol, done.output
    assert ("never trained on" in done.output) is not trained
