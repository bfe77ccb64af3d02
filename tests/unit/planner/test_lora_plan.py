"""Arithmetic of adapters by hand, and a model of 32B on one card of 80 GB."""

import pytest

from retool_mcore.config.lora import Lora
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.hardware import parse
from retool_mcore.planner.plan import Plan, make_plan
from retool_mcore.planner.report import refusal
from tests.unit.planner.plans import THIRTY_TWO, rl


def test_flops_by_hand():
    """A layer of 24 + 12 + 12 + 24 in attention and 3 * 20 in the MLP; a head of 28; two rows."""
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    attention = 6 * 2 * 2 * 3 * (1 + 9)
    assert shape.train_flops([1, 3], Lora()) == 6 * (2 * 132 + 28) * 4 + attention == 7728
    thin = Lora(rank=1, targets=["q_proj", "down_proj"])  # A and B: 4 + 6, and 5 + 4
    assert shape.train_flops([1, 3], thin) == (4 * 292 + 6 * 2 * 19) * 4 + attention == 6304
    assert shape.product_flops(1, thin) == 2 * (292 + 2 * 19), "a forward pass has no gradient to leave out"
    assert shape.product_flops(4, thin) == 2 * (3 * 292 + 4 * 2 * 19), "all of it computed twice"


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
