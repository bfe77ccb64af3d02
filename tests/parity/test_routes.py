"""algorithm.router_replay in verl's Megatron worker: experts of the engine (R3), of the first pass
(R2).
"""

from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from tests.forked import run_scenario
from tests.parity.rl_ranks import LENGTHS, PROMPT_TOKENS

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")

LOAD = "experts/load_max_over_mean"
R3 = ("r3", "r3_recompute")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario("tests.parity.routes_scenario", tmp_path_factory.mktemp("routes"))


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row])


@pytest.mark.parametrize("name", R3)
def test_the_actor_computes_what_transformers_does_with_the_same_experts(seen: dict[str, Any], name: str):
    torch.testing.assert_close(flat(seen[name]["own"]), flat(seen["plain"]), atol=1e-4, rtol=0)
    torch.testing.assert_close(flat(seen[name]["replayed"]), flat(seen["plain_replayed"]), atol=1e-4, rtol=0)
    assert (flat(seen["plain"]) - flat(seen["plain_replayed"])).abs().max() > 0.1, "or other experts change nothing"


@pytest.mark.parametrize("name", R3)
def test_the_updates_send_tokens_to_the_replayed_experts(seen: dict[str, Any], name: str):
    """Expert 3 gets each replayed token, and nearly two thirds of those go to expert 2."""
    update = seen[name]["update"]
    loads = []
    for lengths in LENGTHS:
        tokens = sum(lengths) + PROMPT_TOKENS * len(lengths)
        least, most = (tokens - len(lengths)) * 2 / tokens, 2.0  # the last token of a sequence goes where it likes
        loads.append((least, most))
    least, most = (sum(bounds) / len(bounds) for bounds in zip(*loads, strict=True))
    assert least <= update[LOAD] <= most
    assert update[LOAD] > seen["off"][0][LOAD] + 0.1, "or it is what the router would have chosen"


def test_a_layer_that_is_recomputed_takes_the_same_experts(seen: dict[str, Any]):
    assert seen["r3"]["update"] == pytest.approx(seen["r3_recompute"]["update"], rel=1e-5)


def test_the_first_pass_notes_its_experts_and_later_updates_repeat_them(seen: dict[str, Any]):
    r2 = seen["r2"]
    torch.testing.assert_close(flat(r2["own"]), flat(seen["plain"]), atol=1e-4, rtol=0)
    assert len(r2["noted"]) == 16 and all(r2["noted"]), "those that transformers' routers choose"
    assert r2["first"][LOAD] == r2["second"][LOAD]
    assert r2["first"]["loss"] != r2["second"]["loss"], "by now the weights are others"
    once, twice = (step[LOAD] for step in seen["off"])
    assert once != twice != r2["second"][LOAD], "by themselves, the changed routers choose others"
