"""The actor's weights are compared with those of the engines after each weight sync."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.errors import RunError
from retool_mcore.platforms.weight_sums import Sums, checksum, sums_of
from tests.unit.verl.test_engines import trainer_of

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
NAMES = ("model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.0.up_proj.weight",
         "model.layers.1.up_proj.weight", "model.norm.weight")  # fmt: skip


def sums_of_tensors(weights: dict[str, torch.Tensor]) -> Sums:
    return sums_of((name, str(each.dtype), each.numel(), checksum(each)) for name, each in weights.items())


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(4, 6, dtype=torch.bfloat16) for name in NAMES}


def sharded(weights: dict[str, torch.Tensor], ranks: int) -> list[Sums]:
    """Of an engine with tensor parallelism: norms are whole on every rank, all else is sharded."""
    of_ranks = [
        {name: each if "norm" in name else each.chunk(ranks, dim=1)[rank] for name, each in weights.items()}
        for rank in range(ranks)
    ]
    return [sums_of_tensors(each) for each in of_ranks]


def test_a_sharded_engine_is_compared_whole(weights: dict[str, torch.Tensor]):
    from retool_mcore.verl.weight_check import different_layers

    actor = sums_of_tensors(weights)
    assert different_layers(actor, sharded(weights, 2)) == []
    wrong = {**weights, NAMES[2]: weights[NAMES[2]].roll(1) * 2, NAMES[4]: -weights[NAMES[4]]}
    assert different_layers(actor, sharded(wrong, 2)) == ["model.layers.0.", "model.norm.weight"]


def test_what_an_engine_holds_in_another_form_is_skipped(weights: dict[str, torch.Tensor]):
    from retool_mcore.verl.weight_check import different_layers

    quantized = {**weights, NAMES[3]: weights[NAMES[3]].to(torch.float8_e4m3fn)}
    padded = {**quantized, NAMES[0]: torch.zeros(8, 6, dtype=torch.bfloat16)}
    assert different_layers(sums_of_tensors(weights), [sums_of_tensors(padded)]) == []


def test_the_first_sync_sums_all_weights_and_later_ones_a_layer_each(
    weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    from retool_mcore.verl import weight_check

    monkeypatch.setattr(weight_check.dist, "get_rank", lambda: 0)
    engine: Any = SimpleNamespace(get_per_tensor_param=lambda **_: (iter(weights.items()), None))
    sent = weight_check.SentWeights(engine)
    seen = []
    for _ in range(5):
        passed, _ = engine.get_per_tensor_param()
        assert dict(passed) == weights, "engines get what the actor exports"
        seen.append(sent.sums())
    assert seen[0] == ("", sums_of_tensors(weights))
    layers = ["model.layers.0.", "model.layers.1.", "model.norm.weight", "model.embed_tokens.weight"]
    assert [layer for layer, _ in seen[1:]] == layers
    assert seen[1][1] == {
        name: sums for name, sums in sums_of_tensors(weights).items() if name.startswith("model.layers.0.")
    }


def test_an_engine_with_other_weights_ends_the_run(
    weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_of(tmp_path, monkeypatch, [], restarts=3)
    trainer.global_steps = 4
    asked: list[str] = []

    def server(held: dict[str, torch.Tensor]) -> Any:
        return SimpleNamespace(
            weight_sums=SimpleNamespace(remote=lambda prefix: asked.append(prefix) or [sums_of_tensors(held)])
        )

    trainer.actor_rollout_wg = SimpleNamespace(sent_weights=lambda: [("model.", sums_of_tensors(weights)), ("", {})])
    trainer.llm_server_manager.server_handles = [server(weights)]
    trainer.compare_weights()
    trainer.llm_server_manager.server_handles += [server({**weights, NAMES[2]: weights[NAMES[2]] + 1})]
    with pytest.raises(RunError, match=r"Engine 1 does not have .* of step 4: 1 parts differ, .* 'model\.layers\.0\.'"):
        trainer.compare_weights()
    assert asked == ["model."] * 3
