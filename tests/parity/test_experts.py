"""[experts]: a model's routers and the count of their load, compared with transformers."""

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.platforms import get_platform
from tests.forked import run_scenario

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")

LOAD = "experts/load_max_over_mean"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.parity.experts_scenario", tmp_path_factory.mktemp("experts"))


def test_a_router_of_a_bfloat16_model_computes_in_float32_by_default(seen: dict[str, Any]):
    assert (seen["dtype"], seen["plain_dtype"]) == ("torch.float32", "torch.float64")


def test_there_is_no_balancing_loss_by_default(seen: dict[str, Any]):
    assert seen["default"]["routing_type"] == "none"
    torch.testing.assert_close(
        torch.tensor(seen["default"]["gradients"]), torch.tensor(seen["plain"]["gradients"]), atol=1e-5, rtol=1e-3
    )


def test_the_balancing_loss_adds_its_gradient_to_the_routers(seen: dict[str, Any]):
    found, plain = torch.tensor(seen["aux"]["gradients"]), torch.tensor(seen["plain_aux"]["gradients"])
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-3)
    assert (found - torch.tensor(seen["default"]["gradients"])).abs().max() > 1e-3, "or nothing was added"
    assert seen["aux"]["metrics"]["loss"] == seen["default"]["metrics"]["loss"], "the metric is SFT's loss alone"


def test_the_load_is_what_transformers_routers_choose(seen: dict[str, Any]):
    metrics, chosen_LE = seen["default"]["metrics"], torch.tensor(seen["plain"]["loads"])
    assert chosen_LE.sum(dim=1).tolist() == [128.0] * 4, "two experts for each of 64 tokens"
    ratios = (chosen_LE.amax(dim=1) / 32).tolist()
    assert [metrics[f"{LOAD}/layer_{layer}"] for layer in range(4)] == pytest.approx(ratios)
    assert metrics[LOAD] == pytest.approx(sum(ratios) / 4)
    assert metrics["experts/unused"] == 0


def test_rl_reports_the_mean_load_of_its_updates_and_counts_no_other_pass(seen: dict[str, Any]):
    rl = seen["rl"]
    assert rl["counted_without_update"] == rl["left"] == 0, "each update counts its own passes alone"
    first, second = rl["updates"]
    assert first[LOAD] != second[LOAD]
    assert set(rl["reported"]) == set(first)
    for name, value in rl["reported"].items():
        assert value == [pytest.approx((first[name] + second[name]) / 2)]


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
