"""Experts over two and four processes, expert parallelism with TP, PP and CP, train as in one.

Real verl TrainingWorker, Megatron-core and gloo. Tolerances are test_parallel_parity's.
"""

from typing import Any

import pytest
import torch

from tests.parity.megatron_ranks import WHOLE_EXPERTS, launch_all, make_model
from tests.parity.test_parallel_parity import RECOMPUTE, assert_alike

FOUR = {
    "tp2_ep2": {"tp": 2, "ep": 2},
    "pp2_vpp2_ep2": {"pp": 2, "vpp": 2, "ep": 2},
}
# Where no sequence is filled up to a multiple of tp and cp, whose filling is also sent to experts.
SAME_TOKENS = ("pp2_vpp2_ep2", "ep2", "pp2_recompute")
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 3.0}
GLOBAL_AUX = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 3.0}
ALIKE = {  # jobs that cut a step into the same micro-batches, which these losses look at
    "aux_pp2": "aux",
    "aux_ep2": "aux_dp2",
    "global_aux_ep2": "global_aux_dp2",
}
TWO = {"ep2": {"ep": 2}, "tp2_ep2_etp1": WHOLE_EXPERTS, "cp2_ep2_of_cp": {"cp": 2, "ep": 2}}
REPLAY_TWO = {"tp2_ep2_etp1": WHOLE_EXPERTS, "pp2_vpp2": {"pp": 2, "vpp": 2}, "cp2": {"cp": 2}}
LOAD = "experts/load_max_over_mean"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Job name -> loss, grad_norm and load of four steps."""
    folder = tmp_path_factory.mktemp("experts")
    model = str(make_model(folder / "model", "qwen3_moe"))

    def job(name: str, **settings: Any) -> dict[str, Any]:
        return {"name": name, "model": model, "actions": [["train", 1, 4]], **settings}

    replay = {"model": model, "role": "actor", "auto": False, "micro_batch_tokens": 128}
    one = [job("one"), job("recompute", transformer=RECOMPUTE), job("aux", transformer=AUX)]
    two = [job(name, layout=layout) for name, layout in TWO.items()]
    two += [job("pp2_recompute", layout={"pp": 2}, transformer=RECOMPUTE)]
    two += [job("aux_pp2", layout={"pp": 2}, transformer=AUX), job("aux_dp2", transformer=AUX)]
    two += [job("aux_ep2", layout={"ep": 2}, transformer=AUX), job("global_aux_dp2", transformer=GLOBAL_AUX)]
    two += [job("global_aux_ep2", layout={"ep": 2}, transformer=GLOBAL_AUX)]
    four = [job(name, layout=layout) for name, layout in FOUR.items()]
    for name, layout in {"one": {}, **REPLAY_TWO}.items():
        for mode, action in (("R3", "replayed"), ("R2", "noted")):
            own = {"name": f"{mode}_{name}", "layout": layout, "router_replay": mode, "actions": [[action]]}
            (one if name == "one" else two).append(replay | own)
    return {name: answers[0] for name, answers in launch_all({1: one, 2: two, 4: four}, folder).items()}


@pytest.mark.parametrize("name", [*FOUR, *TWO, "recompute", "pp2_recompute"])
def test_every_layout_trains_like_one_process(runs: dict[str, Any], name: str):
    assert_alike(runs[name], runs["one"])


@pytest.mark.parametrize("name", [*SAME_TOKENS, "recompute"])
def test_each_token_counts_once_in_the_load(runs: dict[str, Any], name: str):
    for here, there in zip(runs[name], runs["one"], strict=True):
        assert {key for key in here if key.startswith("experts/")} == {
            LOAD, "experts/unused", *(f"{LOAD}/layer_{layer}" for layer in range(4)),
        }  # fmt: skip
        for key in (key for key in here if key.startswith("experts/")):
            assert here[key] == pytest.approx(there[key], rel=0.02), "a tie may fall to another expert"


@pytest.mark.parametrize("name", ALIKE)
def test_a_balancing_loss_is_the_same_in_every_layout(runs: dict[str, Any], name: str):
    assert_alike(runs[name], runs[ALIKE[name]])


@pytest.mark.parametrize("name", REPLAY_TWO)
def test_replayed_experts_reach_their_tokens_in_every_layout(runs: dict[str, Any], name: str):
    """With data parallelism, of the rows of its first rank: every second one."""
    found, one = runs[f"R3_{name}"], runs["R3_one"]
    for here, there in zip(found, one[:: len(one) // len(found)], strict=True):
        assert here[:-1] == pytest.approx(there[:-1], abs=1e-4), "the last value is for no token"


@pytest.mark.parametrize("name", REPLAY_TWO)
def test_recorded_experts_are_those_of_one_process(runs: dict[str, Any], name: str):
    found, one = runs[f"R2_{name}"], runs["R2_one"]
    for here, there in zip(found, one[:: len(one) // len(found)], strict=True):
        same = (torch.tensor(here) == torch.tensor(there)).all(dim=-1).float().mean()
        assert same > 0.99, "a tie may fall to another expert"
