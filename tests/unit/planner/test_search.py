"""What `retool plan` proposes, and that every shipped RL configuration is among the best of it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import load_run
from retool_mcore.model.files import shape_of_model
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import hardware_of_run, parse
from retool_mcore.planner.lengths import assumed
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.report import _layout
from retool_mcore.planner.search import proposals
from tests.unit.planner.plans import CONFIGS

PROPOSED = tomllib.loads(Path(__file__).with_name("proposed.toml").read_text(encoding="utf-8"))["case"]


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


@pytest.mark.parametrize("case", PROPOSED, ids=lambda case: " ".join([*case[:2], *case[2]]))
def test_proposals_fit_with_a_margin_are_sorted_and_stay_as_recorded(case: Any):
    """Where a formula or a constant changes on purpose, record them again."""
    name, device, settings, count, *best = case
    config, hardware = load_run(CONFIGS / f"{name}.toml", settings), parse(device)
    plans = proposals(config, shape_of_model(config.model.path), hardware, assumed(config, None), limit=100)
    assert len(plans) == count
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    assert all(plan.training_gib <= calibrated("usable_memory") * hardware.device.memory_gib for plan in plans)
    assert all(plan.rollouts_gib <= hardware.device.memory_gib for plan in plans)
    assert [_layout(plan) for plan in plans[: len(best)]] == best
