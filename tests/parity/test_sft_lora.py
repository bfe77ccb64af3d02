"""SFT's engine with adapters, without torchrun: it learns, its checkpoints hold adapters alone, and
it resumes from them exactly.
"""

from typing import Any

import pytest

from tests.forked import run_scenario


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.parity.lora_scenario", tmp_path_factory.mktemp("lora"))


def test_adapters_learn_with_frozen_weights_and_dropout_in_training_only(seen: dict[str, Any]):
    learnt = seen["learnt"]
    assert learnt[0] == pytest.approx(seen["before"], abs=1e-6), "the first forward pass is the base's"
    assert learnt[-1] < 0.2 * learnt[0]
    assert seen["first"][0] == learnt[0] and abs(seen["first"][1] - learnt[1]) > 1e-4


def test_a_checkpoint_holds_adapters_their_optimizer_and_no_model(seen: dict[str, Any]):
    files = seen["files"]
    held = {name.removeprefix("model/huggingface/") for name in files if name.startswith("model/huggingface/")}
    assert {"adapter_model.safetensors", "adapter_config.json", "adapter_base.json"} <= held
    assert not [name for name in held if name.endswith(".safetensors") and not name.startswith("adapter")]
    assert (seen["adapter"]["r"], seen["adapter"]["lora_alpha"]) == (4, 8)
    # 3 layers, rank 4, matrices of 128, 64 and 384: float32 once, and three times in the optimizer.
    weight = 4 * 3 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    assert weight < files["model/huggingface/adapter_model.safetensors"] < 1.2 * weight
    states = sum(size for name, size in files.items() if name.startswith("optimizer/") and name.endswith(".distcp"))
    assert 3 * weight < states < 5.5 * weight


def test_a_resumed_run_repeats_the_same_steps(seen: dict[str, Any]):
    """With dropout's random numbers, and from an asynchronously written checkpoint."""
    assert seen["resumed"] == seen["later"]
    assert seen["resumed_again"] == seen["later"][1:]


def test_adapters_of_another_base_are_refused_by_name(seen: dict[str, Any]):
    assert "/other is a different or incomplete model: model.safetensors differs." in seen["other"]
    assert not seen["other"].startswith("the checkpoint "), "nothing is damaged"
