"""What `retool plan` proposes, and that every shipped RL configuration is among the best of it."""

import re
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_run
from retool_mcore.model.files import shape_of_model
from retool_mcore.model.shape import PUBLISHED
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import hardware_of_run, parse
from retool_mcore.planner.lengths import assumed
from retool_mcore.planner.plan import Plan, make_plan
from retool_mcore.planner.search import proposals
from tests.unit.planner.plans import CONFIGS, SEVEN, THIRTY_TWO, rl, sft


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_*x*.toml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_has_the_plan_that_it_names_and_no_proposal_is_much_faster(path: Path):
    config = load_run(path)
    shape, hardware = shape_of_model(config.model.path), hardware_of_run(config)
    plan = make_plan(config, shape, hardware)
    best = proposals(config, shape, hardware, assumed(config, None))[0]
    assert plan.fits and plan.stall_problem == ""
    assert plan.longest_part[1] <= plan.step_s <= 1.2 * best.step_s, f"{best.config} takes {best.step_s:.0f} s"
    said = re.findall(r"^# retool plan: (.*)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
    memory = f"{plan.training_gib:.1f} GiB of each device in training"
    if plan.rollout is not None:
        assert said == [f"{plan.step_s:,.0f} s a step, {memory}, {plan.rollout.total:.1f} in rollouts"]
    else:
        assert said in ([], [f"{plan.step_s:.1f} s a step, {memory}"])


def found(name: str, *settings: str, hardware: str = "h200x8") -> list[Plan]:
    config = rl(name, *settings)
    return proposals(config, shape_of_model(config.model.path), parse(hardware), assumed(config, None), limit=100)


def test_proposals_fit_with_a_margin_divide_and_are_sorted():
    plans = found("rl_qwen2.5_32b_h100x16", hardware="h100x16")
    assert plans and all(plan.fits for plan in plans)
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    for plan in plans:
        assert plan.rollout is not None
        assert plan.train.total + calibrated("asleep_gib") <= 0.95 * 79.1
        assert plan.rollout.weights + plan.rollout.kv_cache + calibrated("engine_gib") + plan.rollout.training <= 79.1
        assert 16 % plan.parallel.model_parallel == 0 and THIRTY_TWO.kv_heads % plan.parallel.tp == 0
        assert plan.parallel.tp * plan.parallel.cp <= 8, "within a node"
        longest = plan.config.max_sequence_tokens
        assert plan.micro_batch_tokens * plan.parallel.cp >= longest or plan.memory.recompute == "auto"
    config = sft()
    assert proposals(config, PUBLISHED["Qwen2.5-72B"], parse("h100x1"), assumed(config, None)) == []
    for hardware, on_cpu in (("h200x8", 0.0), ("h100x1", 1.0)):  # states go to the host only where they must
        two = proposals(config, SEVEN, parse(hardware), assumed(config, None), limit=2)
        assert [plan.memory.optimizer_on_cpu for plan in two][:1] == [on_cpu] and len(two) <= 2


def test_context_parallelism_cuts_the_sequence_and_not_the_heads_on_npus():
    """MindSpeed's ring, as Transformer Engine's: 28 heads need not divide by tp * cp = 8."""
    plans = found("rl_qwen2.5_7b_a2x8", hardware="a2x8")
    assert SEVEN.heads == 28 and (4, 2) in {(plan.parallel.tp, plan.parallel.cp) for plan in plans}
    rollouts = [plan.config.rollout for plan in plans if isinstance(plan.config, RlConfig)]
    assert {rollout.engine_tp for rollout in rollouts} == {2}, "as configured: decoding is not measured there"
    assert max(rollout.engine_memory_fraction for rollout in rollouts) <= 0.75


def test_recomputation_follows_the_memory_there_is():
    few = {plan.memory.recompute for plan in found("rl_qwen2.5_7b_h200x8")[:6]}
    assert "full" not in few and {"none", "auto"} <= few, "a 7B model on 140 GiB need not recompute everything"
    small = ("data.max_prompt_tokens=512", "rollout.max_response_tokens=2048")
    assert found("rl_qwen2.5_7b_h200x8", *small)[0].memory.recompute == "none"
    for plan in found("rl_qwen2.5_7b_h200x8", "memory.adam_states=float32", hardware="h100x8"):
        if plan.parallel.model_parallel == 1:
            assert plan.memory.recompute in ("full", "auto")


def test_an_actor_that_may_stay_stays_where_the_engine_does_not_need_its_room():
    """A step of 64 short responses fills no cache, and moving the actor costs seconds."""
    few = ("train.prompts_per_step=16", "train.mini_batch_prompts=16", "rollout.group_size=8",
           "data.max_prompt_tokens=512", "rollout.max_response_tokens=2048")  # fmt: skip
    best = found("rl_qwen2.5_7b_h200x8", *few)[0]
    assert not best.memory.offload_idle
    assert isinstance(best.config, RlConfig) and best.config.rollout.engine_memory_fraction < 0.9
    many = found("rl_qwen2.5_7b_h200x8")[0]
    assert many.memory.offload_idle, "1,024 long responses an engine wait for its cache"


def test_experts_are_spread_over_replicas_that_are_there_and_recompute_everything():
    plans = found("rl_qwen3_30b_a3b_h200x8")
    assert {plan.parallel.ep for plan in plans} > {1, 8} and plans[0].parallel.ep == 4
    for plan in plans:  # experts stay whole, and are spread over the ranks of tp and cp, too
        sizes = plan.parallel
        assert sizes.etp == 1 and plan.dp * sizes.tp * sizes.cp % sizes.ep == 0
    assert {plan.memory.recompute for plan in plans} == {"full"}
    tokens = {plan.config.train.micro_batch_tokens * plan.parallel.cp for plan in plans}
    assert tokens >= {18432, 2 * 18432, 3 * 18432}, "an expert needs many tokens"
