"""Run by test_routes.py in its own process: RL's worker on a tiny Qwen3-MoE that repeats experts.

Prints one JSON object: what the worker computes with its own experts, with replayed ones (R3)
and with those that it noted itself (R2), and the same of plain transformers.
"""

from pathlib import Path
from typing import Any

from tests.parity.megatron_ranks import make_model
from tests.parity.rl_ranks import LENGTHS, RlEngine, row, rows
from tests.scenario import print_as_one_rank

LAYERS, TOP = 4, 2
LOAD = "experts/load_max_over_mean"


def sequences() -> list[list[int]]:
    """The tokens of ``rows(0, 1)``."""
    return [
        row(100 * mini_batch + number, length)["input_ids"]
        for mini_batch, lengths in enumerate(LENGTHS)
        for number, length in enumerate(lengths)
    ]


def plain(folder: Path, replayed: list[Any] | None = None) -> tuple[list[list[float]], list[Any]]:
    """transformers' log-probabilities of each sequence's tokens, and its experts [T, L, K].

    ``replayed``: of each sequence the experts [T - 1, L, K] of all tokens but the last, which
    replace the router's.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    logprobs, routes = [], []
    for number, ids in enumerate(sequences()):
        chosen: list[Any] = []

        def choose(gate: Any, inputs: Any, output: Any, number: int = number, chosen: Any = chosen) -> Any:
            logits_TE, _, own_TK = output
            indices_TK = own_TK.clone()
            if replayed is not None:
                indices_TK[:-1] = replayed[number][:, len(chosen)]
            chosen.append(indices_TK)
            return logits_TE, logits_TE.gather(1, indices_TK).softmax(-1), indices_TK

        hooks = [layer.mlp.gate.register_forward_hook(choose) for layer in model.model.layers]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        for hook in hooks:
            hook.remove()
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
        routes.append(torch.stack(chosen, dim=1))
    return logprobs, routes


def with_routes(data: Any, routes: list[Any] | None) -> Any:
    """``data`` as verl's actor gets it with router replay, with the experts of each sequence."""
    import torch
    from verl.utils import tensordict_utils as tu

    if routes is not None:
        rows_of = [torch.cat([route, torch.zeros_like(route[:1])])[:length].to(torch.int16)
                   for route, length in zip(routes, map(len, sequences()), strict=True)]  # fmt: skip
        data["routed_experts"] = torch.nested.as_nested_tensor(rows_of, layout=torch.jagged)
    tu.assign_non_tensor_data(data, "enable_routing_replay", True)
    return data


def logprobs(engine: RlEngine, routes: list[Any] | None) -> tuple[list[list[float]], Any]:
    """The worker's log-probabilities of each sequence's tokens, and the experts that it noted."""
    from verl.utils import tensordict_utils as tu

    data = with_routes(rows(0, 1), routes)
    tu.assign_non_tensor(data, compute_loss=False)
    output: Any = engine.worker.infer_batch(data)
    return [each[:-1].tolist() for each in output["log_probs"].unbind()], output.get("routed_experts", None)


def update(engine: RlEngine, routes: list[Any]) -> dict[str, float]:
    """The load of the experts in a step of two updates."""
    from verl.utils import tensordict_utils as tu

    data = with_routes(rows(0, 1), routes)
    tu.assign_non_tensor(data, mini_batch_size=8, global_batch_size=8, epochs=1, seed=0, dataloader_kwargs={})
    metrics = tu.get(engine.worker.train_mini_batch(data), "metrics")
    return {name: metrics[name][0] for name in (LOAD, "experts/unused")} | {"loss": metrics["loss"][-1]}


def found(folder: Path) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state

    model = make_model(folder / "model", "qwen3_moe")
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    def engine_of(mode: str, **more: Any) -> RlEngine:
        parallel_state.destroy_model_parallel()
        job = {"model": str(model), "role": "actor", "auto": False, "micro_batch_tokens": 128, "lr": 0.5}
        return RlEngine({**job, "router_replay": mode, **more})

    # All tokens to experts 2 and 3, but those of every third position to 0 and 3.
    replayed = [
        torch.tensor([[[0 if position % 3 == 0 else 2, 3]] * LAYERS for position in range(len(ids) - 1)])
        for ids in sequences()
    ]
    own_logprobs, own_routes = plain(model)
    out: dict[str, Any] = {"plain": own_logprobs, "plain_replayed": plain(model, replayed)[0]}
    for name, more in (("r3", {}), ("r3_recompute", {"transformer": recompute})):
        engine = engine_of("R3", **more)
        out[name] = {"own": logprobs(engine, [route[:-1] for route in own_routes])[0]}
        out[name]["replayed"] = logprobs(engine, replayed)[0]
        out[name]["update"] = update(engine, replayed)
    engine = engine_of("R2")
    noted_logprobs, noted = logprobs(engine, None)
    noted_routes = [each.long() for each in noted.unbind()]
    out["r2"] = {
        "own": noted_logprobs,
        "noted": [torch.equal(a.sort().values, b.sort().values) for a, b in zip(noted_routes, own_routes, strict=True)],
        "first": update(engine, noted_routes),
        "second": update(engine, noted_routes),  # the weights are others by now, the experts are not
    }
    out["off"] = [update_of_own(engine_of("disabled"), steps) for steps in (1, 2)]
    return out


def update_of_own(engine: RlEngine, steps: int) -> dict[str, float]:
    """The load of the last of so many steps whose experts are the router's own."""
    from verl.utils import tensordict_utils as tu

    for _ in range(steps):
        data = rows(0, 1)
        tu.assign_non_tensor(data, mini_batch_size=8, global_batch_size=8, epochs=1, seed=0, dataloader_kwargs={})
        metrics = tu.get(engine.worker.train_mini_batch(data), "metrics")
    return {LOAD: metrics[LOAD][0]}


if __name__ == "__main__":
    print_as_one_rank(found)
