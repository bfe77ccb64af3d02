"""Settings of a CUDA run on NPUs: applied, a remark if without effect, or refused in one error."""

from pathlib import Path

import pytest

from ascend.adapter import Ascend
from ascend.limits import check, markdown
from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError
from tests.families import write_hub_cache

ROOT = Path(__file__).parents[3]
A2 = ROOT / "configs" / "rl_qwen2.5_7b_a2x8.toml"


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config(RlConfig, A2, settings))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.fp8=tensorwise",), "Atlas A2 does not support FP8"),
        (("lora.rank=8",), "linear layers are untested with adapters"),
        (("memory.adam_states=compact",), "precision-aware optimizer"),
        (("memory.fused_cross_entropy=true",), "Triton for CUDA"),
        (("rollout.precision=fp8", "algorithm.importance_sampling=token"), 'Set rollout.precision = "model"'),
        (("rollout.kv_cache=fp8", "algorithm.importance_sampling=token"), 'Set rollout.kv_cache = "model"'),
        (
            ("algorithm.router_replay=R3", "memory.recompute=full", "train.micro_batch_tokens=40000"),
            'algorithm.router_replay = "R3": vllm-ascend 0.23.0 returns the experts',
        ),
        (("verl_overrides.actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",), "the run uses vLLM"),
        (("verl_overrides.global_profiler.tool=nsys",), "only NVIDIA GPUs"),
        *(
            ((f"verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.{option}",), message)
            for option, message in (
                ("moe_permute_fusion=true", "only Transformer Engine"),
                ("enable_cuda_graph=true", "ACL"),
                ("attention_backend=fused", "cuDNN"),
                ("context_parallel_algo=ulysses_cp_algo", "ring attention's zigzag"),
            )
        ),
    ],
)
def test_settings_without_a_counterpart_are_refused_with_the_reason(settings: tuple[str, ...], message: str):
    text = refused(*settings)
    assert message in text
    assert str(A2) in text and 'run.platform = "ascend"' in text


def test_settings_without_effect_are_remarks():
    remarks = Ascend().remarks(load_config(RlConfig, A2))
    assert [each.partition(":")[0] for each in remarks] == [
        "train.max_engine_restarts",
        "run.seed, and a separate seed for each request",
        "metrics engine/running, engine/queued and engine/restarts",
    ]
    assert "a dead engine ends the run" in remarks[0]
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
