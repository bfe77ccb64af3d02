"""RL's plan of small models beside what was recorded: 0.5B, 512 responses a step, on one GPU.

A step of a small model is the host's: the engine launches each prefill kernel by kernel, and each
decoding step of more responses than it has graphs for. Recorded (in data/) are the mean
lengths and the median seconds of a run's steps from the third on, without those that saved.
f03b0a2, and 328593a in words, were in the fit of these constants (planner/calibration.py); 7e84857
alone and 328593a with the tool were not, but were in sight when these were chosen and rounded.

Runs that share a host's cores wait longer for it, which no configuration says. So their host's part
counts 1.32 times, in every phase: fitted to generation of 7e84857 with the tool and in words and to
SFT of 7e84857 beside f03b0a2's alone, and held on all updates and on adapters.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from retool_mcore.config import Parallel, SftConfig, load_config
from retool_mcore.config.lora import Lora
from retool_mcore.model.published import PUBLISHED
from retool_mcore.planner.calibration import CALIBRATION, Constant, calibrated
from retool_mcore.planner.generation import Engines, prefills, stream, wave
from retool_mcore.planner.hardware import parse
from retool_mcore.planner.lengths import Lengths, of_rl_rows
from retool_mcore.planner.plan import Plan, make_plan
from retool_mcore.planner.steptime import Work, pass_s, sync_host_s, sync_s
from tests.unit.planner.plans import ALONE, CONFIGS, FOUR, SEVEN, TWO, beside, rl

HALF = PUBLISHED["Qwen2.5-0.5B"]
FILE = Path(__file__).with_name("data") / "rl_0.5b.jsonl"
RECORDED = {row["row"]: row for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
WORDS, ADAPTERS = ("rollout.tools=[]",), ("lora.rank=32", "lora.alpha=64")
THEN_S = 0.13 + 512 * 5.2e-4 - (0.06 + 512 * 3.9e-4)  # more for advantages than since c565d8b


class Row(NamedTuple):
    settings: tuple[str, ...]
    hardware: str
    host: dict[str, float]
    driver_s: float
    lengths: Lengths
    measured: dict[str, float]


THEN = ("rollout.engine_args={cuda_graph_max_bs_decode=256}",)  # what these runs had


def recorded(name: str, hardware: str, host: dict[str, float], driver_s: float = 0.0, *settings: str) -> Row:
    row = RECORDED[name]
    measured = {
        "step": row["timing_s/step"],
        "generate": row["timing_s/gen"],
        "update": row["timing_s/update_actor"],
    }
    return Row(settings, hardware, host, driver_s, of_rl_rows([row]), measured)


def of_means(prompt: float, mean: float, **measured: float) -> tuple[Lengths, dict[str, float]]:
    """328593a recorded its mean lengths alone; their spread is taken from f03b0a2 in words."""
    like = of_rl_rows([RECORDED["f03b0a2, words"]])
    assert like.median is not None
    times = mean / like.mean
    lengths = replace(
        like, prompt=prompt, mean=mean, median=like.median * times, longest=like.longest * times,
        limit=like.longest * times,
    )  # fmt: skip
    return lengths, measured


ROWS = {
    "f03b0a2, tool": recorded("f03b0a2, tool", "h200x1", TWO, THEN_S),
    "f03b0a2, words": recorded("f03b0a2, words", "h200x1", TWO, THEN_S, *WORDS),
    "7e84857, tool": recorded("7e84857, tool", "h100x1", FOUR),
    "7e84857, tool, alone": recorded("7e84857, tool, alone", "h100x1", ALONE),
    "7e84857, words": recorded("7e84857, words", "h100x1", FOUR, 0.0, *WORDS),
    "7e84857, adapters": recorded("7e84857, adapters", "h100x1", FOUR, 0.0, *ADAPTERS),
    "328593a, words": Row(WORDS, "h100x1", ALONE, THEN_S, *of_means(97.3, 122.0, step=8.8, generate=4.6, update=3.2)),
    "328593a, no call": Row((), "h100x1", ALONE, THEN_S, *of_means(247.0, 133.0, step=9.4, generate=4.7, update=3.8)),
}


def planned(row: Row) -> dict[str, float]:
    plan: Plan = make_plan(rl("rl_gsm8k_gpu1", *THEN, *row.settings), HALF, parse(row.hardware), lengths=row.lengths)
    phases = {name: seconds for name, seconds in beside(plan, row.host).items() if name != "metrics"}
    phases["advantage"] += row.driver_s
    return phases | {"step": sum(phases.values())}


@pytest.mark.parametrize("name", ROWS)
def test_a_recorded_step_of_a_small_model_is_planned_within_5_percent(name: str):
    row = ROWS[name]
    found = planned(row)
    assert found["step"] == pytest.approx(row.measured["step"], rel=0.05), found
    assert {each: found[each] for each in row.measured} == pytest.approx(row.measured, rel=0.10), found


def test_the_driver_and_the_sync_are_planned_as_they_were_measured_alone():
    plan = make_plan(rl("rl_gsm8k_gpu1"), HALF, parse("h100x1"), lengths=ROWS["7e84857, tool, alone"].lengths)
    row = RECORDED["7e84857, tool, alone"]
    assert plan.phases["weight_sync"] == pytest.approx(row["timing_s/update_weights"], rel=0.10)
    assert plan.phases["metrics"] == pytest.approx(row["timing_s/metrics"], rel=0.20)  # of three steps


@pytest.mark.parametrize("name", ["7e84857, tool", "7e84857, words", "7e84857, adapters"])
def test_what_the_driver_does_is_planned_as_it_was_measured_since_c565d8b(name: str):
    """Advantages are no slower beside other runs; metrics are, by what the host's other work is."""
    row, recorded = ROWS[name], RECORDED[name]
    phases = make_plan(rl("rl_gsm8k_gpu1", *row.settings), HALF, parse(row.hardware), lengths=row.lengths).phases
    assert phases["advantage"] == pytest.approx(recorded["timing_s/adv"], rel=0.10)
    assert FOUR["other"] * phases["metrics"] == pytest.approx(recorded["timing_s/metrics"], rel=0.15)


@pytest.mark.parametrize(("fp8", "rate"), [(False, 7593), (True, 9504)])
def test_a_bare_engine_is_planned_within_5_percent(fp8: bool, rate: float):
    """perf/RESULTS.md: 64 requests of 2 to 4 k tokens, one turn each: no prefill comes between."""
    lengths = Lengths(shortest=2000, mean=3000, longest=4000, prompt=100, limit=4000)
    engines = Engines(shape=SEVEN, hardware=parse("h200x1"), tp=1, fp8=fp8, count=1, responses=64,
                      ahead=0.0, max_running=64, kv_tokens=10**9, lengths=lengths)  # fmt: skip
    assert 64 * 3000 / wave(engines, 64) == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "hardware", "host", "rate"),
    [
        ((), "h200x1", ALONE, 98_492),
        ((), "h100x1", FOUR, 77_016),
        (ADAPTERS, "h100x1", FOUR, 51_684),
    ],
    ids=["f03b0a2", "7e84857", "7e84857, adapters"],
)
def test_sft_of_a_small_model_is_planned_within_10_percent(
    settings: tuple[str, ...], hardware: str, host: dict[str, float], rate: float
):
    """A step's 17.9 thousand tokens are one micro-batch, which the host launches for 0.17 s."""
    config = load_config(SftConfig, CONFIGS / "sft_gsm8k_gpu1.toml", settings)
    plan = make_plan(config, HALF, parse(hardware), mean_tokens=17_922 / config.train.global_batch)
    assert plan.tokens_per_step / sum(beside(plan, host).values()) == pytest.approx(rate, rel=0.10)


def test_the_optimizers_step_of_adapters_takes_its_launches():
    """Measured, SFT at 7e84857: 22.4 ms of 336 tensors, 53 of 896; their bytes take 0.2 and 4."""
    config = load_config(SftConfig, CONFIGS / "sft_gsm8k_gpu1.toml", ADAPTERS)
    plan = make_plan(config, HALF, parse("h100x1"), mean_tokens=280)
    assert plan.phases["optimizer"] == pytest.approx(24 * 7 * 2 * calibrated("optimizer_tensor_s"))
    assert beside(plan, FOUR)["optimizer"] == pytest.approx(22.4e-3, rel=0.10)
    attention = load_config(SftConfig, CONFIGS / "sft_gsm8k_gpu1.toml", (*ADAPTERS, "lora.targets=['attention']"))
    assert make_plan(attention, HALF, parse("h100x1")).phases["optimizer"] == pytest.approx(24 * 4 * 2 * 5e-5)
    two = make_plan(config, HALF, parse("h100x2"), mean_tokens=280)
    assert two.host_s["optimizer"] == pytest.approx(plan.host_s["optimizer"] / 2), "each rank steps its own"
    whole = load_config(SftConfig, CONFIGS / "sft_gsm8k_gpu1.toml", ())
    assert make_plan(whole, SEVEN, parse("h100x1")).host_s["optimizer"] == 0.0, "the device moves 7B's states"


def test_what_the_host_launches_in_training_by_hand():
    """One micro-batch of 24 layers, too small for the device; forward and backward are three."""
    work, hardware = Work(tokens=10.0, squares=0.0), parse("h100x1")

    def seconds(lora: Lora, **how: float) -> float:
        more: dict[str, Any] = {"passes": 3, "micro_batches": 1} | how
        return pass_s(HALF, hardware, Parallel(), work, fp8=False, lora=lora, **more)

    layer, adapter = calibrated("dense_layer_s"), calibrated("adapter_launch_s")
    assert seconds(Lora()) == pytest.approx(24 * 3 * layer)
    assert seconds(Lora(rank=8)) == pytest.approx(24 * 3 * (layer + 7 * adapter))
    assert seconds(Lora(rank=8, targets=["mlp"]), passes=1) == pytest.approx(24 * (layer + 3 * adapter))
    assert seconds(Lora(), micro_batches=5, host=1.5) == pytest.approx(7.5 * seconds(Lora()))
    assert pass_s(HALF, parse("h100x2"), Parallel(pp=2), work, passes=3, micro_batches=1, fp8=False) == pytest.approx(
        12 * 3 * layer
    )


def test_a_sync_merges_each_adapted_matrix():
    """Measured at 7e84857 beside three runs: 0.38 s with adapters, 0.31 and 0.28 without."""
    whole, thin = Lora(), Lora(rank=32, targets=["attention"])
    more = sync_s(HALF, parse("h100x1"), running=False, lora=thin) - sync_s(HALF, parse("h100x1"), running=False)
    moved = 20 * 24 * HALF.layer_params / (3.35e12 * calibrated("memory"))
    assert more == pytest.approx(24 * 4 * calibrated("merge_s") + moved)
    assert sync_host_s(HALF, thin) - sync_host_s(HALF, whole) == pytest.approx(24 * 4 * calibrated("merge_s"))
    row = (
        RECORDED["7e84857, adapters"]["timing_s/update_weights"] - RECORDED["7e84857, tool"]["timing_s/update_weights"]
    )
    assert FOUR["weight_sync"] * 24 * 7 * calibrated("merge_s") == pytest.approx(row, rel=0.10)


def test_a_plan_says_how_much_of_a_small_models_step_is_the_hosts():
    lengths = ROWS["7e84857, tool"].lengths
    small = make_plan(rl("rl_gsm8k_gpu1"), HALF, parse("h100x1"), lengths=lengths)
    told = [note for note in small.notes if "the host's work" in note]
    assert told == [f"{sum(small.host_s.values()):.2f} s of a step are the host's work: 1.3 times that where "
                    "other runs share its cores"]  # fmt: skip
    large = make_plan(rl("rl_qwen2.5_7b_h200x8"), SEVEN, parse("h200x8"))
    assert not [note for note in large.notes if "the host's work" in note]


def test_a_decoding_step_above_what_is_captured_takes_its_launches():
    lengths = Lengths.evenly(100, 200)
    few, many = (Engines.of(rl("rl_gsm8k_gpu1", *words), HALF, parse("h100x1"), 10**7, lengths) for words in (THEN, ()))
    assert (few.captured, many.captured) == (256, 512), "as many as run at once"
    launches = 24 * calibrated("launch_layer_s")
    more = 257 * calibrated("decode_request_s") + calibrated("decode_step_s")
    assert few.step_s(257, 25_700) == pytest.approx(launches + more)
    assert few.step_s(256, 25_600) == many.step_s(256, 25_600) < launches / 3
    assert many.step_s(257, 25_700) < launches / 3
    config = rl("rl_qwen2.5_32b_h200x8", "rollout.engine_tp=4")
    assert Engines.of(config, SEVEN, parse("h200x8"), 10**7, lengths).captured == 512
    large = replace(few, shape=PUBLISHED["Qwen2.5-72B"])  # whose device may take longer than its launches
    assert large.step_s(300, 3_000_000) == replace(large, captured=512).step_s(300, 3_000_000)


def test_prefills_of_later_turns_by_hand():
    assert prefills([], 4.0) == 0.0
    assert prefills([7.0, 7.0, 7.0], 4.0) == 1.0, "they start in one step"
    assert prefills([0.0, 1000.0, 2000.0], 1.0) == pytest.approx(3, abs=0.01), "each for itself"
    assert prefills([0.0, 10.0], 1000.0) == pytest.approx(11), "one in every step"
    assert prefills([0.0, 10.0], 10.0) == pytest.approx(1 + 10 * (1 - 2.718281828**-1))
    assert prefills([3.0], 0.25) == 0.25


def test_a_wave_waits_for_the_prefills_of_its_turns():
    """Equal responses of two calls: two prefills for all of them, of 28 layers each."""
    same = Lengths(shortest=300, mean=300, longest=300, prompt=10, limit=300)
    engines = Engines(shape=SEVEN, hardware=parse("h200x1"), tp=1, fp8=False, count=1,
                      responses=64, ahead=0.0, max_running=64, kv_tokens=10**9, lengths=same)  # fmt: skip
    with mock.patch.dict(CALIBRATION, launch_layer_s=Constant(1.0, "")), \
            mock.patch.object(Engines, "step_s", lambda *_: 1.0):  # fmt: skip
        plain, calling = (wave.__wrapped__(replace(engines, calls=calls), 64) for calls in (0.0, 2.0))
        slow = wave.__wrapped__(replace(engines, calls=2.0, host=3.0), 64)
        assert plain == pytest.approx(300)
        # The first starts with a prefill, and 64 of the second within 100 steps, at random.
        assert calling - plain == pytest.approx(28 * (1 + 100 * (1 - 2.718281828 ** (-1 / 100))), rel=0.01)
        assert slow - plain == pytest.approx(3 * (calling - plain))
        # Among 32 at once of 600 steps between two turns' ends, a step of "async" has one in 6 %.
        stepped = replace(engines, responses=1e4, calls=2.0, ahead=1.0, max_running=32)
        with_calls, _ = stream(stepped, 1.0, 0.0)
        without, _ = stream(replace(stepped, calls=0.0), 1.0, 0.0)
        share = 1 - 2.718281828 ** (-32 * 2 / 300)
        assert with_calls / without == pytest.approx(1 + 28 * share, rel=0.05)


def test_all_of_a_steps_responses_reach_an_engine_one_after_another():
    lengths = Lengths.evenly(100, 200, prompt=80)
    engines = Engines.of(rl("rl_gsm8k_gpu1"), HALF, parse("h100x1"), 10**7, lengths)
    assert engines.start_s(8) - engines.prefill_s(512 * 80 / 8) == pytest.approx(512 * calibrated("start_response_s"))


def test_the_upper_half_rises_from_a_known_median():
    known = Lengths(shortest=40, mean=115, longest=580, median=104, limit=580)
    drawn = known.quantiles(10_000)
    assert drawn[5000] == pytest.approx(104, abs=0.1) and drawn == sorted(drawn) and drawn[-1] < 580
    assert sum(drawn) / 10_000 == pytest.approx(115, rel=0.001)
    assert drawn[2500] == pytest.approx(72, rel=0.01)
    assert known.context == pytest.approx(sum(each**2 for each in drawn) / 10_000 / 2 / 115, rel=0.001)
    assert replace(known, median=None).quantiles(10_000)[5000] < 50, "the law alone has half of them near the shortest"


def test_a_median_of_those_that_finished_is_that_of_all_only_where_nearly_all_did():
    row = RECORDED["f03b0a2, words"]
    assert of_rl_rows([row]).median == row["length/finished/p50"]
    assert of_rl_rows([row | {"behavior/stop/finished": 0.9}]).median is None
    assert of_rl_rows([{key: value for key, value in row.items() if key != "length/finished/p50"}]).median is None


def test_a_plan_gives_larger_graphs_their_memory_and_generation_what_they_save():
    """SGLang's own rule: 2 MiB for each request of the largest step in a graph."""
    row = ROWS["7e84857, tool, alone"]
    then, now = (
        make_plan(rl("rl_gsm8k_gpu1", *words), HALF, parse("h100x1"), lengths=row.lengths) for words in (THEN, ())
    )
    assert then.rollout and now.rollout
    assert now.rollout.beyond - then.rollout.beyond == pytest.approx(0.5)
    assert now.rollout.asleep - then.rollout.asleep == pytest.approx(0.5)
    assert then.phases["generate"] - now.phases["generate"] == pytest.approx(2.2, abs=0.1)
