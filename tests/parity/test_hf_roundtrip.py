"""Hugging Face -> Megatron -> Hugging Face gives back the same bits, however the model is cut.
Through mbridge.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.megatron_ranks import WHOLE_EXPERTS, launch, make_model

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
EXPERTS = {"ep2": {"ep": 2}, "tp2_ep2_etp1": WHOLE_EXPERTS}  # layouts of models with experts
LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, **EXPERTS}
MODELS = {  # name -> (architecture, tied embeddings)
    "qwen2": ("qwen2", False),
    "qwen2_tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "llama": ("llama", False),
    "qwen3_moe": ("qwen3_moe", False),
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if layout not in EXPERTS or model == "qwen3_moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """models/<name> and, of each layout, <name>_<layout>_<dtype>; an untied model after a tied one,
    in one process.
    """
    folder = tmp_path_factory.mktemp("roundtrip")
    for name, (kind, tied) in MODELS.items():
        make_model(folder / "models" / name, kind, tied=tied)
    for ranks in (1, 2):
        jobs = []
        for layout_name, layout in LAYOUTS.items():
            if (ranks == 1) != (layout_name == "one"):
                continue
            for name in ("qwen2_tied", "qwen2", "qwen3", "llama", "qwen3_moe"):
                if (name, layout_name) not in CASES:
                    continue
                for dtype in ("float32", "bfloat16"):
                    job = f"{name}_{layout_name}_{dtype}"
                    model = str(folder / "models" / name)
                    actions = [["export", str(folder / job)]]
                    jobs.append({"name": job, "model": model, "layout": layout, "dtype": dtype, "actions": actions})
        launch(jobs, ranks, folder / f"ranks{ranks}")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_weights_come_back_bit_equal(folder, model, layout, dtype):
    want = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights(folder / "models" / model).items()}
    got = weights(folder / f"{model}_{layout}_{dtype}")
    assert got.keys() == want.keys()
    assert {name: tensor.dtype for name, tensor in got.items()} == {name: tensor.dtype for name, tensor in want.items()}
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_the_export_and_computes_the_same(folder, model):
    from transformers import AutoModelForCausalLM

    token_ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        want, got = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(token_ids).logits
            for path in (folder / "models" / model, folder / f"{model}_tp2_float32")
        )
    assert torch.equal(got, want)
