"""Adapters belong to their run and base; an export has them in the base's weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.model.adapter import peft_config, read_adapter, write_adapter
from retool_mcore.run import checkpoint
from retool_mcore.run.export import export

SFT = Path(__file__).parents[2] / "configs" / "sft_tiny_cpu.toml"
RANK = "lora.rank=8"


def run_in(tmp_path: Path, *settings: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *settings])


def save(run: SftConfig, step: int, **adapter: Any) -> None:
    def write(folder: str, _: int) -> None:
        path = Path(folder) / "model" / "huggingface"
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "tokenizer.json").write_text("words")
        if adapter:
            write_adapter(str(path), **adapter)

    with checkpoint.Saver(run, write, rank=0, barrier=lambda: None) as saver:
        saver.save(step)


@pytest.mark.parametrize("changed", ["lora.rank=0", 'lora.targets=["mlp"]', "lora.base_precision=fp8"])
def test_adapters_belong_to_their_run(tmp_path: Path, changed: str):
    save(run_in(tmp_path, RANK), 5)
    assert checkpoint.find_resume(run_in(tmp_path, RANK)) is not None
    with pytest.raises(CheckpointError, match=r"belongs to a different run: .*lora\."):
        checkpoint.find_resume(run_in(tmp_path, RANK, changed))


Q, NORM, BIAS = "model.layers.0.self_attn.q_proj", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two files of weights and an index."""
    folder = tmp_path / "base"
    folder.mkdir()
    torch.manual_seed(0)
    save_file({f"{Q}.weight": torch.randn(6, 4)}, folder / "one.safetensors")
    save_file({BIAS: torch.randn(6), NORM: torch.randn(4)}, folder / "two.safetensors")
    where = {f"{Q}.weight": "one.safetensors", BIAS: "two.safetensors", NORM: "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": "float32"}))
    return folder


def adapter_on(base: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(1)
    weights = {Q: (torch.randn(2, 4).to(dtype), torch.randn(6, 2).to(dtype))}
    return {"weights": weights, "config": peft_config(str(base), rank=2, alpha=3, dropout=0.0, matrices=["q_proj"])}


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_the_base_with_the_adapters_in_it(tmp_path: Path, base: Path, dtype: torch.dtype):
    made = adapter_on(base, dtype)
    save(run_in(tmp_path, RANK), 5, **made)
    to = export(tmp_path / "sft_tiny_cpu", tmp_path / "out")
    got, had = load_all(to), load_all(base)
    (a, b), weight = made["weights"][Q], had[f"{Q}.weight"].to(dtype)
    want = (weight.double() + 1.5 * b.double() @ a.double()).to(dtype)
    torch.testing.assert_close(got[f"{Q}.weight"], want, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
    assert not torch.equal(got[f"{Q}.weight"], weight)
    assert all(torch.equal(got[name], had[name].to(dtype)) for name in (BIAS, NORM))
    assert json.loads((to / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (to / "tokenizer.json").read_text() == "words"
    assert not list(to.glob("adapter*"))
    index = json.loads((to / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in got.values())


def test_an_adapter_is_exported_alone_when_it_is_asked_for(tmp_path: Path, base: Path):
    save(run_in(tmp_path, RANK), 5, **adapter_on(base))
    to = export(tmp_path / "sft_tiny_cpu", tmp_path / "out", adapter=True)
    assert {path.name for path in to.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "adapter_base.json", "tokenizer.json",
    }  # fmt: skip
    assert read_adapter(to)[1]["base_model_name_or_path"] == str(base)
    other = shutil.copytree(base, tmp_path / "other")
    save_file({f"{Q}.weight": torch.zeros(6, 4)}, other / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"other is a different or incomplete model: one\.safetensors"):
        read_adapter(to, str(other))
    export(tmp_path / "sft_tiny_cpu", tmp_path / "out", adapter=True)  # over its own


def test_an_export_wants_the_base_that_the_adapters_were_trained_on(tmp_path: Path, base: Path):
    save(run_in(tmp_path, RANK), 5, **adapter_on(base))
    save_file({f"{Q}.weight": torch.zeros(6, 4)}, base / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"were trained on .*base, but .* one\.safetensors differs\. Restore"):
        export(tmp_path / "sft_tiny_cpu", tmp_path / "out")
    assert not (tmp_path / "out").exists()
