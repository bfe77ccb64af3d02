"""The planner against the runs that it was fitted to, and those that it was not."""

from dataclasses import replace
from unittest import mock

import pytest

from retool_mcore.config import Parallel, SftConfig, load_config
from retool_mcore.model.published import PUBLISHED
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import CALIBRATION, Constant, calibrated
from retool_mcore.planner.hardware import parse
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.steptime import Work, pass_s, sync_s
from tests.unit.planner.plans import CONFIGS, PLAIN, SEVEN, THIRTY_TWO, TWO_H200, rl, sft

# perf/history.jsonl, "SFT of a 7B shape on 2 H200": settings, peak GiB, tokens/s of a
# GPU. 83,081 tokens a step, 32 sequences.
MEASURED = {
    "cp2_kept": (("train.micro_batch_tokens=11264", "memory.adam_states=compact"), 127.3, 11549),  # fitted
    "cp2_plain_cross_entropy": (("memory.fused_cross_entropy=false",), 129.1, 11253),  # fitted
    "cp2": ((), 122.3, 11275),
    "tp2": (
        ("parallel.tp=2", "parallel.cp=1", "train.micro_batch_tokens=16384", "memory.fused_cross_entropy=false"),
        107.2,
        11129,
    ),
    "dp2_12_layers_recomputed": (
        ("parallel.cp=1", "train.micro_batch_tokens=16384", "memory.recompute=12"),
        125.5,
        10353,
    ),
    "dp2_6_layers_bfloat16_moments": (
        ("parallel.cp=1", "train.micro_batch_tokens=16384", "memory.recompute=6",
         "memory.adam_states=bfloat16"),
        117.4,
        10670,
    ),
    "dp2_auto": (
        ("parallel.cp=1", "train.micro_batch_tokens=11264", "memory.adam_states=compact", "memory.recompute=auto"),
        129.5,
        12186,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_measured_runs_of_7b_on_two_h200(name: str):
    """Memory within 10 %, time within 20 %, as issue 7 asks; met within 6 % of both."""
    settings, gib, rate = MEASURED[name]
    plan = make_plan(sft(*TWO_H200, *settings), SEVEN, parse("h200x2"), mean_tokens=83081 / 32)
    assert plan.need_gib == pytest.approx(gib, rel=0.10)
    assert plan.tokens_per_step / 2 / plan.step_s == pytest.approx(rate, rel=0.20)
    assert plan.fits


def test_a_measured_out_of_memory_is_refused():
    settings = ("train.micro_batch_tokens=12288", "memory.fused_cross_entropy=false", "memory.adam_states=compact")
    plan = make_plan(sft(*TWO_H200, *settings), SEVEN, parse("h200x2"), mean_tokens=83081 / 32)
    assert not plan.fits and plan.need_gib > 139.8


def test_the_other_way_the_same_model_ran_out_of_memory():
    """Measured on 2 H200 without recomputation: DP 2, CP 2, and TP 2 with micro-batches of 32 k
    tokens.
    """
    for settings in (
        ("parallel.tp=1", "parallel.cp=1", "train.micro_batch_tokens=16384"),
        ("parallel.tp=1", "parallel.cp=2", "train.micro_batch_tokens=16384"),
        ("parallel.tp=2", "parallel.cp=1", "train.micro_batch_tokens=32768"),
    ):
        config = sft("cluster.gpus_per_node=2", *settings, *PLAIN)
        plan = make_plan(config, SEVEN, parse("h200x2"), mean_tokens=2700)
        assert not plan.fits, settings


HALF = ("cluster.gpus_per_node=1", "parallel.cp=1", "memory.recompute=auto", "memory.adam_states=compact",
        "train.micro_batch_tokens=16384", "train.global_batch=16")  # fmt: skip


@pytest.mark.parametrize(("fp8", "gib", "rate"), [("off", 103.6, 23_122), ("tensorwise", 104.5, 31_417)])
def test_measured_runs_of_half_a_7b_on_one_h200(fp8: str, gib: float, rate: float):
    """14 of 28 layers; only the time with FP8 was fitted. bfloat16 was planned before its run."""
    config = sft(*HALF, f"model.fp8={fp8}")
    plan = make_plan(config, replace(SEVEN, layers=14), parse("h200x1"), mean_tokens=44_664 / 16)
    assert plan.need_gib == pytest.approx(gib, rel=0.10)
    assert plan.tokens_per_step / plan.step_s == pytest.approx(rate, rel=0.20)


FP8_7B = ("parallel.cp=1", "memory.adam_states=compact", "memory.recompute=auto", "model.fp8=tensorwise")
FOUR = ("cluster.gpus_per_node=4", "parallel.cp=1", "memory.recompute=auto", "train.micro_batch_tokens=16384")


@pytest.mark.parametrize(
    ("gpus", "settings", "tokens", "gib", "rate"),
    [
        (4, FOUR, 82143, 126.4, 11_709),
        (2, (*FP8_7B, "train.micro_batch_tokens=7168"), 83081, 118.8, 15_276),
        (2, (*FP8_7B, "train.micro_batch_tokens=11264"), 83081, 134.2, 16_688),
    ],
)
def test_measured_runs_of_7b_that_were_not_fitted(
    gpus: int, settings: tuple[str, ...], tokens: int, gib: float, rate: int
):
    plan = make_plan(sft(*TWO_H200, *settings), SEVEN, parse(f"h200x{gpus}"), mean_tokens=tokens / 32)
    assert plan.need_gib == pytest.approx(gib, rel=0.10)
    assert plan.tokens_per_step / gpus / plan.step_s == pytest.approx(rate, rel=0.20)


@pytest.mark.parametrize(
    ("settings", "tokens", "gib", "rate"),
    [
        ((), 105_833, 126.2, 4841),
        (("model.fp8=tensorwise", "train.micro_batch_tokens=6144"), 100_744, 130.5, 6679),
    ],
)
def test_measured_runs_of_half_a_32b_on_two_h200(settings: tuple[str, ...], tokens: int, gib: float, rate: float):
    """perf/baselines/sft_32b_half_h200x2.NVIDIA_H200x2.json and its run in FP8, of 32 layers, TP 2.

    Nothing was fitted to the first. Which values FP8 keeps in a byte was chosen with the second
    and the runs of ``test_what_fp8_adds_to_memory_in_training`` in sight.
    """
    layout = ("cluster.gpus_per_node=2", "parallel.tp=2", "memory.adam_states=bfloat16")
    config = load_config(SftConfig, CONFIGS / "sft_qwen2.5_32b_h200x8.toml", (*layout, *settings))
    plan = make_plan(config, replace(THIRTY_TWO, layers=32), parse("h200x2"), mean_tokens=tokens / 32)
    assert plan.need_gib == pytest.approx(gib, rel=0.02)
    assert plan.tokens_per_step / 2 / plan.step_s == pytest.approx(rate, rel=0.20)


def test_what_fp8_adds_to_memory_in_training():
    """Two copies of the layers' weights, and what a layer keeps in one byte in place of two.

    Measured, of 7B on two with 11,264 tokens, half of it on one with 16,384, and a quarter of A3B,
    which recomputes everything: 4.7, 0.9 and 8.1 GiB. That the copies are two is of Transformer
    Engine 2.11 on Hopper.
    """

    def added(shape: ModelShape, gpus: int, config: str, *settings: str) -> float:
        words = (f"cluster.gpus_per_node={gpus}", *settings)
        plans = [
            make_plan(load_config(SftConfig, CONFIGS / f"{config}.toml", (*words, f"model.fp8={fp8}")), shape,
                      parse(f"h200x{gpus}"), mean_tokens=2700)
            for fp8 in ("tensorwise", "off")
        ]  # fmt: skip
        return plans[0].need_gib - plans[1].need_gib

    kept = ("parallel.cp=1", "memory.recompute=auto", "memory.adam_states=compact")
    whole = added(SEVEN, 2, "sft_qwen2.5_7b_h200x8", *kept, "train.micro_batch_tokens=11264")
    half = added(replace(SEVEN, layers=14), 1, "sft_qwen2.5_7b_h200x8", *kept, "train.micro_batch_tokens=16384")
    ep = ("parallel.ep=2", "train.micro_batch_tokens=49152")
    experts = added(replace(PUBLISHED["Qwen3-30B-A3B"], layers=12), 2, "sft_qwen3_30b_a3b_h200x8", *ep)
    assert [whole, half, experts] == pytest.approx([4.7, 0.9, 8.1], abs=1.6)


A3B = PUBLISHED["Qwen3-30B-A3B"]
TWO_RANKS = ("cluster.gpus_per_node=2", "parallel.ep=2")


@pytest.mark.parametrize(
    ("settings", "gib", "rate"),
    [
        (("train.micro_batch_tokens=16384",), 77, 21_036),  # fitted, as FP8 is
        (("train.micro_batch_tokens=49152",), 87.5, 33_643),
        (("train.micro_batch_tokens=49152", "model.fp8=tensorwise"), 95.6, 24_609),
    ],
)
def test_measured_sft_of_a_quarter_of_experts(settings: tuple[str, ...], gib: float, rate: float):
    """12 of the 48 layers. In FP8, and where an expert gets few tokens, the host is too slow."""
    config = load_config(SftConfig, CONFIGS / "sft_qwen3_30b_a3b_h200x8.toml", (*TWO_RANKS, *settings))
    plan = make_plan(config, replace(A3B, layers=12), parse("h200x2"), mean_tokens=83_771 / 32)
    assert plan.need_gib == pytest.approx(gib, rel=0.10)
    assert plan.tokens_per_step / 2 / plan.step_s == pytest.approx(rate, rel=0.20)


def test_measured_sft_of_half_of_experts_on_four():
    """24 of 48 layers, random routers, at 0209734. The host's time for a layer was fitted."""
    config = load_config(
        SftConfig, CONFIGS / "sft_qwen3_30b_a3b_h200x8.toml", ("cluster.gpus_per_node=4", "parallel.ep=4")
    )
    plan = make_plan(config, replace(A3B, layers=24), parse("h200x4"), mean_tokens=2733)
    assert plan.need_gib == pytest.approx(77, rel=0.10)
    assert plan.tokens_per_step / plan.step_s == pytest.approx(46_260, rel=0.20)


def test_what_experts_cost_by_hand():
    """EP 2, a pass with recomputation, 1 M tokens: copies cross memory eight times in each of three
    exchanges, and half of them the link, there and back.
    """
    shape, hardware, work = replace(A3B, layers=12), parse("h200x2"), Work(tokens=1e6, squares=0.0)

    def seconds(shape: ModelShape, ep: int, micro_batches: int = 1, passes: float = 4, fp8: bool = False) -> float:
        return pass_s(shape, hardware, Parallel(ep=ep), work, passes=passes, micro_batches=micro_batches, fp8=fp8)

    device = hardware.device
    copies = 1e6 * 12 * 8 * 2 * 2048  # bytes of one exchange
    link_s = 2 * copies / 2 / 2 / (device.link * calibrated("link"))  # both ways, half leave, from each of two
    for passes, exchanges in ((4, 3), (3, 2), (1, 1)):
        there = seconds(shape, 2, passes=passes) - seconds(shape, 1, passes=passes)
        assert there == pytest.approx(exchanges * link_s)
    moved_s = 3 * 8 * copies / 2 / (device.bandwidth * calibrated("memory"))
    with mock.patch.dict(CALIBRATION, permute=Constant(0.0, "")):
        without = seconds(shape, 2)
    assert seconds(shape, 2) - without == pytest.approx(moved_s * (1 + calibrated("gaps")))
    launches = 12 * 4 * (calibrated("expert_layer_s") + 64 * calibrated("expert_launch_s"))
    assert seconds(shape, 2, micro_batches=1000) == pytest.approx(1000 * launches)
    assert seconds(shape, 2, micro_batches=1000, fp8=True) == pytest.approx(2500 * launches)
    dense = 64 * 4 * calibrated("dense_layer_s")
    assert seconds(THIRTY_TWO, 1, micro_batches=1000) == pytest.approx(1000 * dense)
    assert seconds(THIRTY_TWO, 1, micro_batches=20) == seconds(THIRTY_TWO, 1), "the device has more to do"
    with mock.patch.dict(CALIBRATION, sync_expert_s=Constant(0.0, "")):
        without = sync_s(shape, hardware, running=False)
    assert sync_s(shape, hardware, running=False) - without == pytest.approx(12 * 3 * 128 * calibrated("sync_expert_s"))


def test_launches_count_every_micro_batch_of_every_update():
    """A rank has 64 responses of 2,048 tokens, one a micro-batch: in four updates, and in the pass
    for old log-probabilities.
    """
    settings = ("train.prompts_per_step=16", "train.mini_batch_prompts=4", "rollout.group_size=8",
                "train.micro_batch_tokens=2048", "rollout.max_response_tokens=1473", "data.max_prompt_tokens=575",
                "rollout.engine_tp=1")  # fmt: skip
    config = rl("rl_qwen3_30b_a3b_h200x8", *TWO_RANKS, *settings)
    slow = {"expert_launch_s": Constant(1.0, ""), "expert_layer_s": Constant(0.0, "")}  # the device is nothing beside
    with mock.patch.dict(CALIBRATION, slow):
        plan = make_plan(config, replace(A3B, layers=6), parse("h200x2"), mean_tokens=2048)
    assert plan.phases["old_log_prob"] == pytest.approx(64 * 6 * 64, rel=0.01)
    assert plan.phases["update"] == pytest.approx(4 * 16 * 6 * 64 * 4, rel=0.01)
