"""What a CUDA run's configuration becomes on NPUs: mapped, or refused in one error, never lost."""

from pathlib import Path

import pytest

from ascend.adapter import Ascend
from ascend.limits import TABLE, check, markdown
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
    ("setting", "message"),
    [
        ("model.fp8=tensorwise", "Atlas A2 does not support FP8"),
        ("lora.rank=8", "linear layers are untested with adapters"),
        ("memory.adam_states=compact", "precision-aware optimizer"),
        ("memory.fused_cross_entropy=true", "Triton for CUDA"),
        ("verl_overrides.engine.override_transformer_config.moe_permute_fusion=true", "only Transformer Engine"),
        ("verl_overrides.actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3", "the run uses vLLM"),
        ("verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid", "FP8"),
        ("verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.enable_cuda_graph=true", "ACL"),
        ("verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.cuda_graph_impl=local", "ACL"),
        (
            "verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=true",
            "apex",
        ),
        (
            "verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=fused",
            "cuDNN",
        ),
        ("verl_overrides.global_profiler.tool=nsys", "only NVIDIA GPUs"),
        ("verl_overrides.actor_rollout_ref.rollout.quantization=fp8", "FP8"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_reason(setting: str, message: str):
    text = refused(setting)
    assert message in text and setting.partition("=")[0].removeprefix("verl_overrides.").split(".")[-1] in text
    assert str(A2) in text and 'run.platform = "ascend"' in text


@pytest.mark.parametrize("name", ["precision", "kv_cache"])
def test_engines_there_have_no_fp8(name: str):
    text = refused(f"rollout.{name}=fp8", "algorithm.importance_sampling=token")
    assert f'rollout.{name} = "fp8"' in text and f'Set rollout.{name} = "model"' in text


def test_the_engine_there_does_not_tell_experts():
    text = refused("algorithm.router_replay=R3", "memory.recompute=full", "train.micro_batch_tokens=40000")
    assert 'algorithm.router_replay = "R3": vllm-ascend 0.23.0 returns the experts' in text


TRANSFORMER = "verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config."


@pytest.mark.parametrize("algorithm", ["ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"])
def test_only_the_ring_reads_what_verl_packs(algorithm: str):
    assert "ring attention's zigzag" in refused(f"{TRANSFORMER}context_parallel_algo={algorithm}")
    check(load_config(RlConfig, A2, [f"{TRANSFORMER}context_parallel_algo=megatron_cp_algo"]))


def test_what_has_no_effect_is_remarked_by_name():
    told = Ascend().remarks(load_config(RlConfig, A2))
    assert [each.partition(":")[0] for each in told] == [
        "train.max_engine_restarts",
        "run.seed, and a separate seed for each request",
        "metrics engine/running, engine/queued and engine/restarts",
    ]
    assert "a dead engine ends the run" in told[0]
    none = Ascend().remarks(load_config(RlConfig, A2, ["train.max_engine_restarts=0"]))
    assert none == told[1:], "none was asked for"
    sft = load_config(SftConfig, ROOT / "configs" / "sft_qwen2.5_7b_a2x8.toml")
    assert Ascend().remarks(sft) == []


def test_all_refusals_are_told_at_once():
    text = refused("model.fp8=blockwise", "memory.fused_cross_entropy=true", "memory.adam_states=bfloat16")
    assert text.count(";") >= 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*_a2x*.toml")), ids=lambda p: p.name)
def test_the_shipped_configs_pass(path: Path):
    check(load_config(SftConfig if path.name.startswith("sft_") else RlConfig, path))


def test_scaled_positions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "meta-llama/Llama-3.2-1B-Instruct"
    write_hub_cache(tmp_path, name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{name} has positions of type llama3, which is not tested"):
        Ascend().check_settings(load_config(RlConfig, A2, [f"model.path={name}"]))


def test_a_cuda_configuration_maps_with_one_word():
    """--platform ascend: the settings of a CUDA run that NPUs have too pass unchanged."""
    run = load_config(RlConfig, A2, ["run.platform=cuda"])
    check(load_config(RlConfig, A2, ["run.platform=ascend"]))
    mapped = load_config(RlConfig, A2)
    assert run.model_dump(exclude={"run"}) == mapped.model_dump(exclude={"run"})


def test_the_readme_has_the_table_of_the_code():
    readme = (ROOT / "ascend" / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- mapping table: python -m ascend -->\n", "<!-- end of the mapping table -->"
    assert readme.partition(begin)[2].partition(end)[0] == markdown()


def test_every_refusal_can_be_met():
    """A row that refuses or remarks looks at the run's settings or at raw keys, but for the one
    that is a command's.
    """
    for row in TABLE:
        asks = row.is_used is not None or bool(row.overrides)
        tells = row.kind in ("refused", "no effect")
        assert asks == (tells and not row.cuda.startswith("retool eval")), row.cuda
        assert bool(row.ascend) == (row.kind != "refused"), row.cuda
