"""A plan is within 20 % of the time and 15 % of the memory of measured runs.

The rows are of perf/RESULTS.md and perf/history.jsonl. The constants of planner/calibration.py are
fitted by hand to all of them.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import load_run
from retool_mcore.model.shape import PUBLISHED, ModelShape
from retool_mcore.planner.hardware import parse
from retool_mcore.planner.lengths import Lengths
from retool_mcore.planner.plan import make_plan
from tests.unit.planner.plans import CONFIGS, ROOT, SEVEN, rl, sft

CASES = tomllib.loads((ROOT / "perf" / "cases.toml").read_text(encoding="utf-8"))
MEASURED = tomllib.loads(Path(__file__).with_name("measured.toml").read_text(encoding="utf-8"))


def shape_of(row: dict[str, Any]) -> ModelShape:
    """The model of a row, with as many layers as were measured."""
    shape = PUBLISHED[row["model"]]
    return replace(shape, layers=row.get("layers", shape.layers))


@pytest.mark.parametrize("row", MEASURED["sft"], ids=lambda row: row["what"])
def test_a_measured_run_of_sft(row: dict[str, Any]):
    config = sft(*row["settings"], name=row["config"])
    plan = make_plan(
        config, shape_of(row), parse(row["hardware"]), mean_tokens=row["tokens"] / config.train.global_batch
    )
    assert plan.tokens_per_step == pytest.approx(row["tokens"])
    assert plan.step_s == pytest.approx(row["seconds"], rel=0.20), plan.phases
    assert plan.fits
    if "gib" in row:
        assert 0.95 * row["gib"] < plan.need_gib < 1.15 * row["gib"], "a plan that is too careful does less harm"


@pytest.mark.parametrize("row", MEASURED["rl"], ids=lambda row: row["what"])
def test_a_measured_step_of_rl(row: dict[str, Any]):
    """Of a case of perf/cases.toml, or of a configuration."""
    case = CASES.get(row["case"], {"config": row["case"], "set": []})
    config = rl(Path(case["config"]).stem, *case["set"], *row["settings"])
    plan = make_plan(config, shape_of(row), parse(row["hardware"]), lengths=Lengths(**row["lengths"]))
    assert plan.step_s == pytest.approx(row["seconds"], rel=0.20), plan.phases
    assert plan.fits
    phases = row.get("phases", {})  # no sum that is right because two of its parts are wrong
    assert {name: plan.phases[name] for name in phases} == pytest.approx(phases, rel=0.20)


def test_a_step_of_0_5b_is_planned_without_known_lengths():
    """The recipe's steps take 7.5 to 10.5 s on an H200, and were planned as 27.7."""
    plan = make_plan(rl("rl_gsm8k_gpu1"), PUBLISHED["Qwen2.5-0.5B"], parse("h200x1"))
    assert 7.5 < plan.step_s < 1.2 * 10.5, plan.phases


@pytest.mark.parametrize("settings", MEASURED["out_of_memory"]["settings"], ids=" ".join)
def test_a_run_of_7b_that_ran_out_of_memory_is_refused(settings: list[str]):
    plan = make_plan(sft(*settings), SEVEN, parse("h200x2"), mean_tokens=83081 / 32)
    assert not plan.fits


@pytest.mark.parametrize("row", MEASURED["recorded"], ids=lambda row: row["what"])
def test_a_plan_that_no_run_has_measured_stays_as_recorded(row: dict[str, Any]):
    """Where a formula or a constant changes on purpose, record its numbers again."""
    config = load_run(CONFIGS / f"{row['config']}.toml", row["settings"])
    lengths = row.get("lengths", MEASURED["recorded_lengths"])
    tree = make_plan(config, shape_of(row), parse(row["hardware"]), lengths=Lengths(**lengths)).to_dict()
    for part, recorded in row["plan"].items():
        found = {name: tree[part][name] for name in recorded} if isinstance(recorded, dict) else tree[part]
        assert found == (recorded if part == "notes" else pytest.approx(recorded, rel=1e-5)), part
