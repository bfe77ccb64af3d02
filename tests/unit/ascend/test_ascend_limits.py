"""Settings of a CUDA run on NPUs: applied, a remark if without effect, or refused in one error."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ascend.adapter import Ascend
from ascend.limits import check, markdown
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from tests.families import write_hub_cache

ROOT = Path(__file__).parents[3]
A2 = ROOT / "configs" / "rl_qwen2.5_7b_a2x8.toml"


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))["case"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case["settings"]))
def test_settings_without_a_counterpart_are_refused_with_the_reason(case: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        check(load_config(RlConfig, A2, case["settings"]))
    assert case["message"] in str(caught.value)
    assert str(A2) in str(caught.value) and 'run.platform = "ascend"' in str(caught.value)


MODEL = "actor_rollout_ref.actor.megatron.override_transformer_config"
KEYS = {  # key of verl and its value -> a part of the reason
    "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3": "the run uses vLLM",
    "actor_rollout_ref.rollout.quantization=fp8": "Atlas A2 does not support FP8",
    f"{MODEL}.moe_permute_fusion=true": "only Transformer Engine",
    f"{MODEL}.enable_cuda_graph=true": "ACL graphs",
    f"{MODEL}.attention_backend=fused": "apex and cuDNN",
    f"{MODEL}.gradient_accumulation_fusion=true": "apex and cuDNN",
    f"{MODEL}.context_parallel_algo=ulysses_cp_algo": "ring attention's zigzag",
    "actor_rollout_ref.actor.optim.exp_avg_dtype=bf16": "TE's FusedAdam",
    "critic.optim.use_precision_aware_optimizer=true": "TE's FusedAdam",
    "critic.model.use_fused_kernels=true": "Triton for CUDA",
    "critic.model.fused_kernel_options.impl_backend=triton": "Triton for CUDA",
    "global_profiler.tool=nsys": "only NVIDIA GPUs",
}
TAKEN = ("actor_rollout_ref.rollout.engine_kwargs.vllm.x=1", f"{MODEL}.context_parallel_algo=megatron_cp_algo",
         f"{MODEL}.moe_permute_fusion=false", "global_profiler.tool=npu")  # fmt: skip


def test_keys_of_verl_are_refused_with_their_reasons_and_all_in_one_error():
    for word, reason in KEYS.items():
        with pytest.raises(ConfigError, match=rf"\[verl_overrides\] {word.partition('=')[0]}: .*{reason}"):
            check(load_config(RlConfig, A2, [f"verl_overrides.{word}"]))
    check(load_config(RlConfig, A2, [f"verl_overrides.{word}" for word in TAKEN]))
    with pytest.raises(ConfigError, match=r"FusedAdam .*; memory\.fused_cross_entropy = true: verl"):
        check(load_config(RlConfig, A2, ["memory.adam_states=compact", "memory.fused_cross_entropy=true"]))


def test_settings_without_effect_are_remarks():
    remarks = Ascend().remarks(load_config(RlConfig, A2))
    assert [each.partition(":")[0] for each in remarks] == [
        "train.max_engine_restarts",
        "run.seed, and a separate seed for each request",
        "metrics engine/running, engine/queued and engine/restarts",
    ]
    assert "a dead engine ends the run" in remarks[0]
    run = load_config(RlConfig, A2, ["train.max_engine_restarts=0"])
    assert len(Ascend().remarks(run)) == 2, "restarts are off"
    sft = load_config(SftConfig, ROOT / "configs" / "sft_qwen2.5_7b_a2x8.toml")
    assert Ascend().remarks(sft) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*_a2x*.toml")), ids=lambda p: p.name)
def test_the_shipped_configs_pass(path: Path):
    check(load_config(SftConfig if path.name.startswith("sft_") else RlConfig, path))


def test_scaled_positions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "meta-llama/Llama-3.2-1B-Instruct"
    write_hub_cache(tmp_path, name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{name} has RoPE scaling of type llama3, which is not tested"):
        Ascend().check_settings(load_config(RlConfig, A2, [f"model.path={name}"]))


def test_the_readme_has_the_table_of_the_code():
    readme = (ROOT / "ascend" / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- mapping table: python -m ascend -->\n", "<!-- end of the mapping table -->"
    assert readme.partition(begin)[2].partition(end)[0] == markdown()
