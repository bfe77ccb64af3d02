"""What adapters save in memory and time, by hand."""

from typing import Literal

import pytest

from retool_mcore.config import Memory, Parallel
from retool_mcore.config.lora import Lora
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.calibration import calibrated
from retool_mcore.planner.hardware import GIB, parse
from retool_mcore.planner.memory import train_memory
from retool_mcore.planner.plan import Plan, make_plan
from retool_mcore.planner.report import refusal
from retool_mcore.planner.steptime import Work, pass_s
from tests.unit.planner.plans import SEVEN, THIRTY_TWO, rl

HIDDEN, FFN, KV, LAYERS = 3584, 18944, 512, 28
# Both sides of each matrix of Qwen2.5-7B: q, o; k, v; gate, up, down.
LAYER = 32 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + FFN))


def test_gradients_and_states_are_those_of_the_adapters_alone():
    found = train_memory(SEVEN, Parallel(), Memory(), dp=2, micro_batch_tokens=0, lora=Lora(rank=32))
    assert found.gradients == pytest.approx(4 * LAYERS * LAYER / GIB)
    assert found.optimizer == pytest.approx(12 * LAYERS * LAYER / 2 / GIB)
    assert found.weights == pytest.approx(2 * (SEVEN.params + LAYERS * LAYER) / GIB)


def test_flops_by_hand():
    """A layer of 24 + 12 + 12 + 24 in attention and 3 * 20 in the MLP; a head of 28; two rows."""
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    attention = 6 * 2 * 2 * 3 * (1 + 9)
    assert shape.train_flops([1, 3], Lora()) == 6 * (2 * 132 + 28) * 4 + attention == 7728
    thin = Lora(rank=1, targets=["q_proj", "down_proj"])  # A and B: 4 + 6, and 5 + 4
    assert shape.train_flops([1, 3], thin) == (4 * 292 + 6 * 2 * 19) * 4 + attention == 6304
    assert shape.product_flops(1, thin) == 2 * (292 + 2 * 19), "a forward pass has no gradient to leave out"
    assert shape.product_flops(4, thin) == 2 * (3 * 292 + 4 * 2 * 19), "all of it computed twice"


def test_a_base_in_fp8_takes_a_byte_a_weight_and_one_matrix_more():
    """All but embedding and head; gate and up are one matrix to Megatron."""
    thin, fp8 = Lora(rank=32), Lora(rank=32, base_precision="fp8")
    for tp in (1, 2):
        whole, stored = (
            train_memory(SEVEN, Parallel(tp=tp), Memory(), dp=1, micro_batch_tokens=64, lora=lora)
            for lora in (thin, fp8)
        )
        layer = 2 * HIDDEN * (HIDDEN + KV) + 3 * HIDDEN * FFN
        assert whole.weights - stored.weights == pytest.approx(LAYERS * layer / tp / GIB)
        assert (
            stored.dequantized_matrix == pytest.approx(2 * HIDDEN * 2 * FFN / tp / GIB) and not whole.dequantized_matrix
        )
        assert whole.total - stored.total == pytest.approx(whole.weights - stored.weights - stored.dequantized_matrix)


def test_a_base_in_fp8_is_made_whole_once_for_each_way_through_a_micro_batch():
    work, hardware = Work.of(64, 2048, 1.0), parse("h100x1")

    def seconds(passes: float, count: int, base: Literal["model", "fp8"]) -> float:
        lora = Lora(rank=32, base_precision=base)
        return pass_s(SEVEN, hardware, Parallel(), work, passes=passes, micro_batches=count, fp8=False, lora=lora)

    made = {each: seconds(each, 8, "fp8") - seconds(each, 8, "model") for each in (1, 3, 4)}
    layer = 2 * HIDDEN * (HIDDEN + KV) + 3 * HIDDEN * FFN
    at_full_rate = 8 * 7 * LAYERS * layer / 3.35e12
    assert made[1] == pytest.approx(at_full_rate / calibrated("dequantize"))
    assert (made[3], made[4]) == (pytest.approx(2 * made[1]), pytest.approx(3 * made[1]))
    assert seconds(3, 4, "fp8") - seconds(3, 4, "model") == pytest.approx(made[3] / 2)


def test_thirty_two_billions_fit_one_card_of_80_gb_with_actor_and_engine_in_fp8():
    def plan(*settings: str) -> Plan:
        return make_plan(rl("rl_qwen2.5_32b_lora_h100x1", *settings), THIRTY_TWO, parse("h100x1"))

    fits = plan()
    assert fits.fits
    assert not plan("lora.base_precision=model").training_fits
    # Without a cache, which comes later: the actor's 32.5 + 0.5 + 3.7, and the engine's 61.
    beside = plan("rollout.precision=model", "rollout.engine_memory_fraction=0.9")
    assert beside.rollout is not None and beside.rollout.syncing == pytest.approx(98, abs=1)
    assert not beside.fits and "the weight sync does not fit" in refusal(beside, parse("h100x1"))
    assert fits.rollout is not None and fits.rollout.syncing == pytest.approx(98 - 29, abs=1)
