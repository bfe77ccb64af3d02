"""The simulation of a step beside all recorded rows of RL: the planner's times, event by event."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from perf.scale import at_size, drawn_lengths, picture, simulate
from retool_mcore.model.published import PUBLISHED
from retool_mcore.planner.hardware import parse
from retool_mcore.planner.lengths import Lengths
from tests.planner.plans import ROOT, rl
from tests.planner.test_measured_rl import CASES, ROWS


@pytest.mark.parametrize("row", ROWS)
def test_a_recorded_row_is_simulated_within_5_percent(row: str):
    (case, *settings), shape, lengths, measured = ROWS[row]
    config = rl(Path(CASES[case]["config"]).stem, *CASES[case]["set"], *settings)
    count = 64
    drawn = [*lengths.quantiles(count)[:-1], lengths.limit]
    order = sorted(range(count), key=lambda number: (number + 0.5) * 0.6180339887 % 1)
    engines = (config.rollout.gpus or 2) // config.rollout.engine_tp
    of_all = [drawn[at] for at in order for _ in range(engines)]
    found = simulate(config, shape, parse("h200x2"), lengths, drawn=of_all, cores=32)
    assert found.step_s == pytest.approx(measured, rel=0.05), found.seconds


def test_what_grows_with_the_gpus_is_the_driver_and_the_slowest_engine():
    given = {"device": "h200", "settings": [], "mean": 1000.0, "prompts": 32}
    config = ROOT / "configs" / "rl_qwen2.5_7b_h200x8.toml"
    small, large = (at_size(config, PUBLISHED["Qwen2.5-7B"], gpus, **given) for gpus in (8, 64))
    assert large.seconds["driver"] > 4 * small.seconds["driver"]
    assert large.seconds["devices' passes"] == pytest.approx(small.seconds["devices' passes"], rel=0.2)
    assert large.seconds["slowest engine"] > small.seconds["slowest engine"] > 0
    assert sum(large.seconds.values()) == pytest.approx(large.step_s + large.seconds["metrics"])
    drawing = picture([small, large], "a & b")
    assert drawing.count("<rect") == 2 * len(small.seconds)
    assert f"64 GPUs, {sum(large.seconds.values()):,.0f} s" in drawing
    ElementTree.fromstring(drawing)


@pytest.mark.parametrize("mode", ["async", "partial_rollout"])
def test_some_engines_stand_for_all_where_no_step_waits_for_the_slowest(mode: str):
    settings = [f"train.mode={mode}", *(["rollout.gpus=32"] if mode == "async" else [])]
    settings += ["cluster.nodes=8", "train.prompts_per_step=32", "train.mini_batch_prompts=32"]
    config = rl("rl_qwen2.5_7b_h200x8", *settings)
    values = drawn_lengths(1000.0, 16384.0, 1024)
    lengths = Lengths(shortest=min(values), mean=1000.0, longest=max(values), prompt=512.0, limit=max(values),
                      sampled=0.8)  # fmt: skip
    few, all_ = (
        simulate(config, PUBLISHED["Qwen2.5-7B"], parse("h200x64"), lengths, drawn=values, cores=512, represented=most)
        for most in (8, 64)
    )
    assert few.step_s == pytest.approx(all_.step_s, rel=0.03)
    assert few.requests_per_s == pytest.approx(all_.requests_per_s, rel=0.03)
    assert few.seconds["driver"] == all_.seconds["driver"]


@pytest.mark.parametrize("settings", [["train.mode=partial_rollout"], ["train.mode=async", "rollout.gpus=4"]])
def test_512_gpus_take_seconds_to_simulate_and_no_part_of_a_step_is_less_than_nothing(settings: list[str]):
    config = ROOT / "configs" / "rl_qwen2.5_7b_h200x8.toml"
    given = {"device": "h200", "settings": settings, "mean": 1000.0, "prompts": 4}
    found = at_size(config, PUBLISHED["Qwen2.5-7B"], 512, **given)
    assert all(seconds > -1e-6 for seconds in found.seconds.values()), found.seconds
    assert found.seconds["devices' passes"] > found.seconds["weight sync"]


def test_calls_wait_where_the_sandbox_has_too_few_cores():
    (case, *settings), shape, lengths, _ = ROWS["69966e8: the same"]
    config = rl(Path(CASES[case]["config"]).stem, *CASES[case]["set"], *settings)
    one, many = (
        simulate(config, shape, parse("h200x2"), lengths, drawn=[lengths.mean], cores=cores) for cores in (1, 32)
    )
    assert one.queued_s > 0.5 > many.queued_s
