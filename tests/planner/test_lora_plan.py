"""What adapters save in memory and time, by hand."""

from __future__ import annotations

import pytest

from retool_mcore.config import Memory, Parallel
from retool_mcore.config.lora import Lora
from retool_mcore.model.shape import ModelShape
from retool_mcore.planner.hardware import GIB, parse
from retool_mcore.planner.memory import train_memory
from retool_mcore.planner.plan import make_plan
from retool_mcore.planner.steptime import Work, pass_s
from tests.planner.plans import CONFIGS, SEVEN, THIRTY_TWO, rl

HIDDEN, FFN, KV, LAYERS = 3584, 18944, 512, 28
# Both sides of each matrix of Qwen2.5-7B: q, o; k, v; gate, up, down.
LAYER = 32 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + FFN))


def test_gradients_and_states_are_those_of_the_adapters_alone():
    found = train_memory(SEVEN, Parallel(), Memory(), dp=2, micro_batch_tokens=0, lora=Lora(rank=32))
    assert found.gradients == pytest.approx(4 * LAYERS * LAYER / GIB)
    assert found.optimizer == pytest.approx(12 * LAYERS * LAYER / 2 / GIB)
    assert found.weights == pytest.approx(2 * (SEVEN.params + LAYERS * LAYER) / GIB)


def test_tensor_parallelism_cuts_the_side_that_the_weight_is_cut_by():
    """q_proj by its output: A [r, in] stays whole; down_proj by its input: B [out, r] does."""
    two = train_memory(
        SEVEN, Parallel(tp=2), Memory(), dp=1, micro_batch_tokens=0, lora=Lora(rank=8, targets=["q_proj", "down_proj"])
    )
    assert two.gradients == pytest.approx(4 * LAYERS * 8 * (HIDDEN + HIDDEN / 2 + HIDDEN + FFN / 2) / GIB)


def test_flops_by_hand():
    """A layer of 24 + 12 + 12 + 24 in attention and 3 * 20 in the MLP; a head of 28; two rows."""
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    attention = 6 * 2 * 2 * 3 * (1 + 9)
    assert shape.train_flops([1, 3], Lora()) == 6 * (2 * 132 + 28) * 4 + attention == 7728
    thin = Lora(rank=1, targets=["q_proj", "down_proj"])  # A and B: 4 + 6, and 5 + 4
    assert shape.train_flops([1, 3], thin) == (4 * 292 + 6 * 2 * 19) * 4 + attention == 6304
    assert shape.product_flops(1, thin) == 2 * (292 + 2 * 19), "a forward pass has no gradient to leave out"
    assert shape.product_flops(4, thin) == 2 * (3 * 292 + 4 * 2 * 19), "all of it computed twice"


def test_a_frozen_weight_takes_two_products_where_a_trained_one_takes_three():
    work, hardware = Work.of(64, 2048, 1.0), parse("h100x1")

    def seconds(passes: float, lora: Lora) -> float:
        return pass_s(SEVEN, hardware, Parallel(), work, passes=passes, micro_batches=1, fp8=False, lora=lora)

    thin = Lora(rank=1, targets=["k_proj"])
    saved = seconds(3, Lora()) - seconds(3, thin)
    forward = 2 * SEVEN.compute_params * work.tokens
    per_flop = (seconds(3, Lora(rank=1001, targets=["k_proj"])) - seconds(3, thin)) / (
        2 * LAYERS * 1000 * (HIDDEN + KV) * work.tokens * 3
    )
    assert saved == pytest.approx(forward * per_flop, rel=1e-3)
    assert seconds(1, thin) == pytest.approx(seconds(1, Lora()), rel=1e-3)


def test_rl_of_seven_billions_fits_one_card_of_80_gb_and_thirty_two_fit_two():
    seven = make_plan(rl("rl_qwen2.5_7b_lora_h100x1"), SEVEN, parse("h100x1"))
    assert seven.fits
    whole = make_plan(rl("rl_qwen2.5_7b_lora_h100x1", "lora.rank=0"), SEVEN, parse("h100x1"))
    assert not whole.fits and whole.training_gib > 2 * seven.training_gib
    assert (CONFIGS / "rl_qwen2.5_32b_lora_h100x2.toml").is_file()
    assert make_plan(rl("rl_qwen2.5_32b_lora_h100x2"), THIRTY_TWO, parse("h100x2")).fits
