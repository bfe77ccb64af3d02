"""[experts]: a model's routers and the count of their load, compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from retool_mcore.platforms import get_platform
from tests.parity.megatron_ranks import batch, launch, make_model
from tests.parity.plain_transformers import choices, of_layers, plain_transformers
from tests.parity.rl_ranks import LENGTHS, row

LOAD = "experts/load_max_over_mean"
COEF = 0.5
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEF}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[str, Any]:
    """SFT with a balancing loss, each step one micro-batch; and a step of RL at learning rate 0."""
    jobs = [
        {"name": "aux", "transformer": AUX, "micro_batch_tokens": 400, "actions": [["train", 1, 4]]},
        {"name": "rl", "role": "actor", "auto": False, "lr": 0.0, "micro_batch_tokens": 128, "actions": [["update"]]},
    ]
    answers = launch([{"model": str(model), **job} for job in jobs], 1, model.parent / "ranks")
    return {name: answer[0] for name, answer in answers.items()}


def ratios(model: Path, sequences: list[list[int]]) -> list[float]:
    """Of each layer the load of its most loaded expert over the mean."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        outputs = [network(torch.tensor([ids]), output_router_logits=True) for ids in sequences]
    counts = [choices(logits_TE) for logits_TE in of_layers(outputs)]
    return [float(count_E.max() / count_E.mean()) for count_E in counts]


def test_the_balancing_loss_adds_its_gradient_and_is_no_part_of_the_metric(seen: dict[str, Any], model: Path):
    lrs = [0.0, *(step["lr"] for step in seen["aux"][:-1])]
    want, without = plain_transformers(str(model), lrs, COEF), plain_transformers(str(model), lrs[:1])
    assert [step["loss"] for step in seen["aux"]] == pytest.approx([loss for loss, _ in want], abs=1e-4)
    assert [step["grad_norm"] for step in seen["aux"]] == pytest.approx([norm for _, norm in want], rel=1e-4)
    assert abs(want[0][1] / without[0][1] - 1) > 1e-3, "or nothing was added"


def test_the_load_is_what_transformers_routers_choose(seen: dict[str, Any], model: Path):
    metrics, want = seen["aux"][0], ratios(model, [ids for ids, _ in batch(1)])
    assert [metrics[f"{LOAD}/layer_{layer}"] for layer in range(4)] == pytest.approx(want)
    assert metrics[LOAD] == pytest.approx(sum(want) / 4)
    assert metrics["experts/unused"] == 0


def test_rl_reports_the_mean_load_of_its_updates_and_counts_no_other_pass(seen: dict[str, Any], model: Path):
    """Before and after the updates, a pass without one computes all rows."""
    updates = [
        ratios(model, [row(100 * update + number, length)["input_ids"] for number, length in enumerate(lengths)])
        for update, lengths in enumerate(LENGTHS)
    ]
    assert updates[0] != pytest.approx(updates[1], rel=0.05)
    want = [sum(pair) / 2 for pair in zip(*updates, strict=True)]
    found = seen["rl"]["load"]
    assert [found[f"{LOAD}/layer_{layer}"] for layer in range(4)] == [[pytest.approx(each)] for each in want]
    assert found[LOAD] == [pytest.approx(sum(want) / 4)]


def test_unused_experts_and_dense_layers_in_the_load():
    get_platform("cpu").activate()
    from retool_mcore.verl.update_worker import expert_load_metrics

    counts_LE = torch.tensor([[0, 0, 0, 0], [8, 0, 4, 4], [4, 4, 4, 4]])
    assert expert_load_metrics(counts_LE) == {
        LOAD: 1.5,
        "experts/unused": 1 / 8,
        f"{LOAD}/layer_1": 2.0,
        f"{LOAD}/layer_2": 1.0,
    }
    assert expert_load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {}
