"""algorithm.router_replay in verl's Megatron worker: experts of the engine (R3), of the first pass
(R2). Compared with transformers on a tiny Qwen3-MoE.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.megatron_ranks import launch, make_model
from tests.parity.rl_ranks import LENGTHS, LOADS, PROMPT_TOKENS, routes, row
from tests.parity.test_parallel_parity import RECOMPUTE

LOAD = LOADS[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("routes") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[str, list[Any]]:
    """Job name -> what its actions returned."""
    common = {"model": str(model), "role": "actor", "auto": False, "micro_batch_tokens": 128, "lr": 0.5}
    r3 = {"router_replay": "R3", "actions": [["replayed"], ["step", "replayed"]]}
    jobs: list[dict[str, Any]] = [
        {"name": "r3", **r3},
        {"name": "r3_recompute", **r3, "transformer": RECOMPUTE},
        {"name": "r2", "router_replay": "R2", "actions": [["noted"], ["step", "noted"], ["step", "noted"]]},
        {"name": "off", "actions": [["step", "own"], ["step", "own"]]},
    ]
    return launch([{**common, **job} for job in jobs], 1, model.parent / "ranks")


def plain(folder: Path, *, replays: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """transformers' log-probabilities of each sequence's tokens, and its experts [T, L, K]: the
    routers' own, or those of ``routes``.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    found, chosen = [], list[torch.Tensor]()

    def choose(gate: Any, inputs: Any, output: Any) -> Any:
        logits_TE, _, own_TK = output
        indices_TK = torch.tensor(routes(len(own_TK)))[:, len(chosen)] if replays else own_TK
        chosen.append(indices_TK)
        return logits_TE, logits_TE.gather(1, indices_TK).softmax(-1), indices_TK

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(choose)
    for batch, lengths in enumerate(LENGTHS):
        for number, length in enumerate(lengths):
            ids = row(100 * batch + number, length)["input_ids"]
            chosen.clear()
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found.append((logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], torch.stack(chosen, dim=1)))
    return found


@pytest.mark.parametrize("name", ["r3", "r3_recompute"])
def test_the_actor_computes_what_transformers_does_with_the_same_experts(
    seen: dict[str, list[Any]], model: Path, name: str
):
    apart = []
    for found, (want, _), (own, _) in zip(
        seen[name][0], plain(model, replays=True), plain(model, replays=False), strict=True
    ):
        torch.testing.assert_close(torch.tensor(found[:-1]), want, atol=1e-4, rtol=0)
        apart.append(float((want - own).abs().max()))
    assert max(apart) > 0.1, "or other experts change nothing"


def test_the_updates_send_tokens_to_the_replayed_experts(seen: dict[str, list[Any]]):
    """In each layer one of four gets each token, at least but the last of a sequence."""
    update, recomputed = seen["r3"][1], seen["r3_recompute"][1]
    tokens = [sum(lengths) + PROMPT_TOKENS * len(lengths) for lengths in LENGTHS]
    least = [2 * (each - len(lengths)) / each for each, lengths in zip(tokens, LENGTHS, strict=True)]
    assert sum(least) / 2 <= update[LOAD][0] <= 2.0
    assert update[LOAD][0] > seen["off"][0][LOAD][0] + 0.1, "or it is what the router would have chosen"
    for name in (*LOADS, "loss"):
        assert recomputed[name] == pytest.approx(update[name], rel=1e-5), "a layer that is recomputed takes the same"


def test_the_first_pass_notes_its_experts_and_later_updates_repeat_them(seen: dict[str, list[Any]], model: Path):
    noted, first, second = seen["r2"]
    for found, (_, own) in zip(noted, plain(model, replays=False), strict=True):
        assert found == own.sort().values.tolist(), "those that transformers' routers choose"
    assert first[LOAD] == second[LOAD]
    assert first["loss"] != second["loss"], "by now the weights are others"
    once, twice = seen["off"]
    assert once[LOAD] != twice[LOAD] != second[LOAD], "by themselves, the changed routers choose others"
