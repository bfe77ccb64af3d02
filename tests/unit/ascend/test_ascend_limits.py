"""Settings of a CUDA run on NPUs: applied, a remark if without effect, or refused in one error."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ascend.adapter import Ascend
from ascend.limits import check, markdown
from retool_mcore.config import RlConfig, load_config, load_run
from retool_mcore.errors import ConfigError
from tests.scenario import ROOT

RL, SFT = (ROOT / "configs" / f"{kind}_qwen2.5_7b_a2x8.toml" for kind in ("rl", "sft"))
REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))["case"]
MODEL = "verl_overrides.actor_rollout_ref.actor.megatron.override_transformer_config"
TAKEN = ("verl_overrides.actor_rollout_ref.rollout.engine_kwargs.vllm.x=1", "verl_overrides.global_profiler.tool=npu",
         f"{MODEL}.context_parallel_algo=megatron_cp_algo", f"{MODEL}.moe_permute_fusion=true",
         f"{MODEL}.attention_backend=fused", f"{MODEL}.gradient_accumulation_fusion=false",
         f"{MODEL}.cp_comm_type=p2p")  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case["settings"]))
def test_settings_without_a_counterpart_are_refused_with_the_reason(case: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        check(load_config(RlConfig, RL, case["settings"]))
    text = str(caught.value)
    assert case["message"] in text and str(RL) in text and 'run.platform = "ascend"' in text
    section, _, key = case["settings"][0].partition("=")[0].partition(".")
    assert section != "verl_overrides" or f"[verl_overrides] {key}: " in text


def test_all_refusals_are_in_one_error_and_other_values_are_taken():
    with pytest.raises(ConfigError, match=r"FusedAdam .*; memory\.fused_cross_entropy = true: verl"):
        check(load_config(RlConfig, RL, ["memory.adam_states=compact", "memory.fused_cross_entropy=true"]))
    check(load_config(RlConfig, RL, TAKEN))


def test_settings_without_effect_are_remarks():
    remarks = Ascend().remarks(load_run(RL))
    assert [each.partition(":")[0] for each in remarks] == [
        "train.max_engine_restarts",
        "run.seed, and a separate seed for each request",
        "metrics engine/running, engine/queued and engine/restarts",
    ]
    assert "a dead engine ends the run" in remarks[0]
    assert len(Ascend().remarks(load_run(RL, ["train.max_engine_restarts=0"]))) == 2, "restarts are off"
    assert Ascend().remarks(load_run(SFT)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*_a2x*.toml")), ids=lambda p: p.name)
def test_the_shipped_configs_pass(path: Path):
    check(load_run(path))


def test_the_readme_has_the_table_of_the_code():
    readme = (ROOT / "ascend" / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- mapping table: python -m ascend -->\n", "<!-- end of the mapping table -->"
    assert readme.partition(begin)[2].partition(end)[0] == markdown()
