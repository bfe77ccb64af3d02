"""On NVIDIA GPUs, with Transformer Engine in bfloat16: experts in grouped products train like
float32, in every layout alike, and replay sends their tokens to the recorded experts.

The reference is plain transformers in float32, one sequence at a time.
"""

from typing import Any

import pytest
import torch

from tests.nightly.numerics.test_gpu_parity import (
    FOUR_STEPS,
    ON_GPU,
    RECOMPUTE,
    SHAPE,
    assert_like_float32,
    assert_same_training,
    jobs,
    two_gpus,
)
from tests.parity.megatron_ranks import WHOLE_EXPERTS, launch, make_model
from tests.parity.test_expert_parity import AUX as STRONG_AUX
from tests.parity.test_expert_parity import GLOBAL_AUX

pytestmark = ON_GPU

Answers = dict[str, Any]
ROUTER = {"moe_router_dtype": "fp32"}  # as a run has it by default; bfloat16 makes ties
UNFUSED = {"moe_permute_fusion": False}  # Megatron-Bridge enables it
# With "aux_loss" at ten times this weight the fourth step's choices, and so its gradient, depend on
# rounding.
AUX = STRONG_AUX | {"moe_aux_loss_coeff": 0.3}
ONE: dict[str, dict[str, Any]] = {
    "one": {},
    "unfused": UNFUSED,
    "recompute": RECOMPUTE,
    "aux": AUX,
    "aux_unfused": AUX | UNFUSED,
    "global_aux": GLOBAL_AUX,
}
TWO: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep2": ({"ep": 2}, {}),
    "ep2_unfused": ({"ep": 2}, UNFUSED),
    "tp2": ({"tp": 2}, {}),
    "tp2_ep2_etp1": (WHOLE_EXPERTS, {}),
    "pp2": ({"pp": 2}, {}),
}
REPLAY_TWO = ("tp2", "tp2_ep2_etp1", "ep2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("gpu") / "model", "qwen3_moe", platform="cuda", **SHAPE))


def training(model: str, name: str, layout: dict[str, int], transformer: dict[str, Any]) -> list[dict[str, Any]]:
    return jobs(model, {name: {"layout": layout, "transformer": ROUTER | transformer}}, [FOUR_STEPS])


def replays(model: str, name: str, layout: dict[str, int], transformer: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"role": "actor", "auto": False, "micro_batch_tokens": 128}
    common |= {"layout": layout, "transformer": ROUTER | transformer}
    replay = jobs(model, {f"R3_{name}": {**common, "router_replay": "R3"}}, [["replayed"]])
    return replay + jobs(model, {f"R2_{name}": {**common, "router_replay": "R2"}}, [["noted"]])


@pytest.fixture(scope="module")
def one(model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    todo = [job for name, transformer in ONE.items() for job in training(model, name, {}, transformer)]
    todo += replays(model, "one", {}, {}) + replays(model, "unfused", {}, UNFUSED)
    answers = launch(todo, 1, tmp_path_factory.mktemp("one"), timeout_s=400)
    return {name: answer[0] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def two(model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    todo = [job for name, settings in TWO.items() for job in training(model, name, *settings)]
    todo += training(model, "aux_ep2", {"ep": 2}, AUX) + training(model, "aux_dp2", {}, AUX)
    for name in REPLAY_TWO:
        todo += replays(model, name, *TWO[name])
    answers = launch(todo, 2, tmp_path_factory.mktemp("two"), timeout_s=400)
    return {name: answer[0] for name, answer in answers.items()}


def test_experts_train_like_float32(one: Answers, model: str):
    assert_like_float32(one["one"], model)


@pytest.mark.parametrize(("name", "plain"), [("unfused", "one"), ("recompute", "one"), ("aux_unfused", "aux")])
def test_how_it_is_computed_changes_nothing(one: Answers, name: str, plain: str):
    assert_same_training(one[name], one[plain])


@pytest.mark.parametrize("name", ["aux", "global_aux"])
def test_a_balancing_loss_changes_what_is_learnt(one: Answers, name: str):
    pairs = zip(one[name], one["one"], strict=True)
    assert min(abs(with_it["grad_norm"] / without["grad_norm"] - 1) for with_it, without in pairs) > 2e-2


def assert_replayed(found: Answers, name: str, one: Answers) -> None:
    """Log-probabilities of the same experts, and the same experts noted.

    Data parallelism has the rows of its first rank.
    """
    replayed, alone = found[f"R3_{name}"], one["R3_one"]
    apart = [
        abs(a - b)
        for here, there in zip(replayed, alone[:: len(alone) // len(replayed)], strict=True)
        for a, b in zip(here[:-1], there[:-1], strict=True)
    ]
    assert max(apart) < 0.1 and sum(apart) / len(apart) < 0.02
    noted, alone = found[f"R2_{name}"], one["R2_one"]
    pairs = zip(noted, alone[:: len(alone) // len(noted)], strict=True)
    same = torch.cat([(torch.tensor(here) == torch.tensor(there)).all(dim=-1).flatten() for here, there in pairs])
    assert same.float().mean() > 0.97, "a near tie may fall to another expert"


def test_replay_reaches_the_tokens_without_the_fused_permutation_too(one: Answers):
    assert_replayed(one, "unfused", one)


class TestTwoGpus:
    pytestmark = two_gpus

    @pytest.mark.parametrize("name", TWO)
    def test_every_layout_trains_like_one_process(self, one: Answers, two: Answers, name: str):
        assert_same_training(two[name], one["one"])

    def test_a_balancing_loss_is_the_same_with_expert_parallelism(self, two: Answers):
        assert_same_training(two["aux_ep2"], two["aux_dp2"])

    @pytest.mark.parametrize("name", REPLAY_TWO)
    def test_replay_reaches_the_tokens_in_every_layout(self, one: Answers, two: Answers, name: str):
        assert_replayed(two, name, one)
