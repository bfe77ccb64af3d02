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
Weights = dict[str, torch.Tensor]
NAMES = ("model.embed_tokens.weight", "model.layers.0.norm.weight", "model.layers.0.up_proj.weight",
         "model.layers.1.up_proj.weight", "model.norm.weight")  # fmt: skip
HYBRID = ("model.layers.2.linear_attn.A_log", "model.layers.2.linear_attn.out_proj.weight",
          "model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.o_proj.weight")  # fmt: skip


def sums_of_tensors(weights: Weights) -> Sums:
    return sums_of((name, str(each.dtype), each.numel(), checksum(each)) for name, each in weights.items())


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return {name: torch.randn(4, 6, dtype=torch.bfloat16) for name in NAMES}


def test_a_sharded_engine_is_compared_whole_but_for_what_it_holds_in_another_form(weights: Weights):
    from retool_mcore.verl.weight_check import different_layers

    def different(held: Weights) -> list[str]:
        """In an engine of two ranks: norms are whole on every rank, all else is sharded."""
        ranks = [
            {name: each if "norm" in name else each.chunk(2, dim=1)[rank] for name, each in held.items()}
            for rank in range(2)
        ]
        return different_layers(sums_of_tensors(weights), [sums_of_tensors(rank) for rank in ranks])

    assert different(weights) == []
    wrong = {NAMES[2]: weights[NAMES[2]].roll(1) * 2, NAMES[4]: -weights[NAMES[4]]}
    assert different(weights | wrong) == ["model.layers.0.", "model.norm.weight"]
    quantized = {NAMES[3]: weights[NAMES[3]].to(torch.float8_e4m3fn)}
    padded = {NAMES[0]: torch.zeros(10, 6, dtype=torch.bfloat16)}
    assert different(weights | quantized | padded) == []


def test_no_layer_of_a_hybrid_engine_is_skipped(monkeypatch: pytest.MonkeyPatch):
    """SGLang stores A_log in float32, and its names lack self_attn."""
    from retool_mcore.verl import weight_check

    weights = {name: torch.randn(4, 6).to(torch.bfloat16) for name in HYBRID}
    monkeypatch.setattr(weight_check.dist, "get_rank", lambda: 0)
    engine: Any = SimpleNamespace(get_per_tensor_param=lambda **_: (iter(weights.items()), None))
    sent = weight_check.SentWeights(engine)
    list(engine.get_per_tensor_param()[0])

    def different(held: Weights) -> list[str]:
        stored = {name.replace(".self_attn", ""): each for name, each in held.items()}
        stored[HYBRID[0]] = stored[HYBRID[0]].float()
        ranks = [
            {name: each if "norm" in name else each.chunk(2)[rank] for name, each in stored.items()}
            for rank in range(2)
        ]
        return weight_check.different_layers(sent.sums()[1], [sums_of_tensors(rank) for rank in ranks])

    assert different(weights) == []
    for name in (HYBRID[0], HYBRID[1], HYBRID[3]):
        assert different(weights | {name: -weights[name]}) == [weight_check.layer_of(name)]


def test_the_first_sync_sums_all_weights_and_later_ones_a_layer_each(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import weight_check

    monkeypatch.setattr(weight_check.dist, "get_rank", lambda: 0)
    engine: Any = SimpleNamespace(get_per_tensor_param=lambda **_: (iter(weights.items()), None))
    sent, every = weight_check.SentWeights(engine), sums_of_tensors(weights)
    layers = ["", "model.layers.0.", "model.layers.1.", "model.norm.weight", "model.embed_tokens.weight"]
    seen = dict[str, Sums]()
    for layer in layers:
        passed, _ = engine.get_per_tensor_param()
        assert dict(passed) == weights, "engines get what the actor exports"
        summed, seen[layer] = sent.sums()
        assert summed == layer
    assert seen == {layer: {name: each for name, each in every.items() if name.startswith(layer)} for layer in layers}


def test_an_engine_with_other_weights_ends_the_run(weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(tmp_path, monkeypatch, [], restarts=3)
    trainer.global_steps = 4
    asked: list[str] = []

    def server(held: Weights) -> Any:
        def remote(prefix: str) -> list[Sums]:
            asked.append(prefix)
            return [sums_of_tensors(held)]

        return SimpleNamespace(weight_sums=SimpleNamespace(remote=remote))

    trainer.actor_rollout_wg = SimpleNamespace(sent_weights=lambda: [("model.", sums_of_tensors(weights)), ("", {})])
    trainer.llm_server_manager.server_handles = [server(weights)]
    trainer.compare_weights()
    trainer.llm_server_manager.server_handles += [server({**weights, NAMES[2]: weights[NAMES[2]] + 1})]
    with pytest.raises(RunError, match=r"Engine 1 does not have .* of step 4: 1 parts differ, .* 'model\.layers\.0\.'"):
        trainer.compare_weights()
    assert asked == ["model."] * 3
