"""SFT's engine on a tiny model, without torchrun: loss mask, schedule, clipping, validation,
micro-batches, resume.
"""

import math
from typing import Any

import pytest

from tests.forked import run_scenario

LR, MIN_LR = 0.01, 0.001


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.parity.sft_scenario", tmp_path_factory.mktemp("sft"))


def schedule(step: int, lr: float, min_lr: float) -> float:
    """Of update ``step``, from 1, of 8: two of warm-up, then a cosine."""
    return lr * step / 2 if step <= 2 else min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * (step - 2) / 6))


def test_the_loss_is_the_mean_over_the_trained_tokens_alone(seen: dict[str, Any]):
    total, count = seen["plain_batch"]
    first = seen["steps"][0]
    assert first["loss"] == pytest.approx(total / count, abs=1e-5)
    assert (first["loss_tokens"], first["perf/total_num_tokens"]) == (count, 100 + 20 + 21 + 22)


def test_the_validation_loss_is_the_mean_over_all_tokens_and_not_over_batches(seen: dict[str, Any]):
    sums = seen["plain_validation"]
    assert [count for _, count in sums] == [11, 60]
    mean = sum(total for total, _ in sums) / 71
    assert seen["validation"] == pytest.approx(mean, abs=1e-5)
    assert abs(mean - sum(total / count for total, count in sums) / 2) > 1e-3, "or the batches do not tell them apart"


def test_a_pass_and_an_update_tell_the_watchdog_that_the_run_is_alive(seen: dict[str, Any]):
    assert seen["alive"] == [True, True]


def test_every_update_has_its_learning_rate_and_the_first_is_not_zero(seen: dict[str, Any]):
    found = [step["lr"] for step in seen["steps"]]
    assert found == pytest.approx([schedule(step, LR, MIN_LR) for step in range(1, 9)])
    assert found[0] == LR / 2 and found[1] == LR and found[7] == pytest.approx(MIN_LR)


def test_adam_gets_the_clipped_gradient_and_the_weight_decay(seen: dict[str, Any]):
    assert seen["steps"][0]["grad_norm"] > 0.1
    assert seen["moments_norm"] == pytest.approx(0.05, rel=1e-4), "optim.clip_grad"
    assert seen["weight_decay"] == [0.0, 0.07], "norms and biases are not decayed"


def test_a_long_sequence_does_not_fill_up_the_other_micro_batches(seen: dict[str, Any]):
    """163 tokens in micro-batches of 64: three, though two would hold them where one has to hold
    100.
    """
    forwards = seen["forwards"]
    assert sum(tokens for tokens, _ in forwards) == 163 and len(forwards) == 3
    assert [tokens for tokens, _ in forwards if tokens > 64] == [100]
    assert all((layers > 0) == (tokens > 64) for tokens, layers in forwards)


def test_a_resumed_run_repeats_the_same_steps(seen: dict[str, Any]):
    assert [step["lr"] for step in seen["same"]] == pytest.approx([schedule(step, LR, MIN_LR) for step in range(5, 9)])
    assert [step["loss"] for step in seen["same"]] == [step["loss"] for step in seen["steps"][4:]]
    assert seen["same_weight_decay"] == [0.0, 0.07]


def test_a_changed_learning_rate_counts_from_the_next_step_on(seen: dict[str, Any]):
    """Megatron would take the saved one, from the schedule and from the parameter groups, without a
    word.
    """
    assert [step["lr"] for step in seen["changed"]] == pytest.approx(
        [schedule(step, 0.004, 0.0) for step in range(5, 9)]
    )
    assert seen["changed_weight_decay"] == [0.0, 0.5]
    assert seen["changed"][0]["loss"] == seen["steps"][4]["loss"], "weights are the saved ones"
    assert seen["changed"][1]["loss"] != seen["steps"][5]["loss"]
