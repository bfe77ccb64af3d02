"""Hugging Face -> Megatron -> Hugging Face through mbridge: the same bits in bfloat16."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.megatron_ranks import WHOLE_EXPERTS, launch, make_model

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
CASES = {  # name -> (architecture, tied embeddings, layout); in float32: test_model_parity.py
    "qwen2_tied_pp2": ("qwen2", True, {"pp": 2}),
    "llama_tp2": ("llama", False, {"tp": 2}),
    "qwen3_moe_ep2": ("qwen3_moe", False, {"ep": 2}),
    "qwen3_moe_tp2_ep2_etp1": ("qwen3_moe", False, WHOLE_EXPERTS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """models/<case>, and the export of each case."""
    folder, jobs = tmp_path_factory.mktemp("roundtrip"), []
    for name, (kind, tied, layout) in CASES.items():
        model = str(make_model(folder / "models" / name, kind, tied=tied))
        actions = [["export", str(folder / name)]]
        jobs.append({"name": name, "model": model, "layout": layout, "dtype": "bfloat16", "actions": actions})
    launch(jobs, 2, folder / "ranks")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_bit_equal(folder, name):
    want = {key: tensor.bfloat16() for key, tensor in weights(folder / "models" / name).items()}
    got = weights(folder / name)
    assert got.keys() == want.keys()
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    assert [key for key in want if not torch.equal(got[key], want[key])] == []
