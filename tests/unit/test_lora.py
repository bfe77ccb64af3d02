"""[lora]: its settings, what they exclude, and the merged model of adapters and base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.model.adapter import merge, merged, peft_config, read_adapter, rounded, write_adapter
from retool_mcore.platforms import get_platform
from retool_mcore.run import checkpoint
from retool_mcore.run.export import export
from tests.unit.test_models import DENSE, EXPERTS, check

CONFIGS = Path(__file__).parents[2] / "configs"
SFT, RL = CONFIGS / "sft_tiny_cpu.toml", CONFIGS / "rl_tiny_cpu.toml"
RANK = "lora.rank=8"


def test_experts_get_no_adapters(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"lora\.rank = 8, but .* has 16 experts, which cannot have adapters"):
        check(tmp_path, EXPERTS, RANK)
    check(tmp_path, {}, RANK, DENSE)


def test_verl_gets_the_adapters_and_sends_whole_weights_to_its_engines():
    pytest.importorskip("verl", reason="verl is not installed")
    platform = get_platform("cpu")
    platform.activate()
    from verl.workers.rollout.sglang_rollout.utils import lora_served_as_adapter

    from retool_mcore.verl.keys.tree import check_ppo_tree, ppo_tree

    tree = ppo_tree(load_config(RlConfig, RL, [RANK, 'lora.targets=["mlp"]', "algorithm.kl_coef=0.1"]), platform)
    check_ppo_tree(tree)
    model = tree.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (8, 32)
    assert list(model.target_modules) == ["gate_proj", "up_proj", "down_proj"]
    assert model.lora.get("rank", 0) == 0, "with it verl would call Megatron-Bridge"
    assert not lora_served_as_adapter(model), "or SGLang would wait for adapters"
    plain = ppo_tree(load_config(RlConfig, RL, ["lora.alpha=64"]), platform).actor_rollout_ref.model
    assert plain.lora_rank == 0 and plain.lora.rank == 0


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
    weights = {f"{Q}.weight": torch.randn(6, 4), BIAS: torch.randn(6), NORM: torch.randn(4)}
    save_file({f"{Q}.weight": weights[f"{Q}.weight"]}, folder / "one.safetensors")
    save_file({BIAS: weights[BIAS], NORM: weights[NORM]}, folder / "two.safetensors")
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


def test_an_export_of_a_base_in_fp8_has_the_rounded_matrix_and_the_rest_as_it_is(tmp_path: Path, base: Path):
    made = adapter_on(base)
    save(run_in(tmp_path, RANK), 5, **made, base_in_fp8=True)
    got, had = load_all(export(tmp_path / "sft_tiny_cpu", tmp_path / "out")), load_all(base)
    assert torch.equal(got[f"{Q}.weight"], merged(rounded(had[f"{Q}.weight"]), *made["weights"][Q], 1.5))
    assert not torch.equal(got[f"{Q}.weight"], merged(had[f"{Q}.weight"], *made["weights"][Q], 1.5))
    assert torch.equal(got[BIAS], had[BIAS]) and torch.equal(got[NORM], had[NORM])


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
    for name in (BIAS, NORM):
        assert torch.equal(got[name], had[name].to(dtype))
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
    export(tmp_path / "sft_tiny_cpu", tmp_path / "out", adapter=True)  # over its own


def test_an_export_wants_the_base_that_the_adapters_were_trained_on(tmp_path: Path, base: Path):
    save(run_in(tmp_path, RANK), 5, **adapter_on(base))
    save_file({f"{Q}.weight": torch.zeros(6, 4)}, base / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"were trained on .*base, but .* one\.safetensors differs\. Restore"):
        export(tmp_path / "sft_tiny_cpu", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged_from = tmp_path / "sft_tiny_cpu/checkpoints/global_step_5/actor/model/huggingface"
    with pytest.raises(CheckpointError):
        merge(merged_from, tmp_path / "anywhere")
