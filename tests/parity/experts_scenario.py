"""Run by test_experts.py in its own process: SFT's and RL's workers on a tiny Qwen3-MoE, one rank.

Prints one JSON object: what the routers hold and compute, their gradients and load, and the
gradients and the load of plain transformers.
"""

from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.data.chat import TokenizedChat
from tests.parity.megatron_ranks import make_model
from tests.parity.sft_scenario import make_engine
from tests.scenario import print_as_one_rank

SETTINGS = ("cluster.gpus_per_node=1", "data.max_length_tokens=64", "train.steps=8", "train.global_batch=2")
SETTINGS += ("train.micro_batch_tokens=64", "optim.clip_grad=1e9", "optim.warmup_fraction=0")
AUX = ("experts.load_balancing={aux_loss=0.5}",)
RAW_ROUTER = "verl_overrides.engine.override_transformer_config.moe_router_dtype"
COEF, EXPERTS, TOP = 0.5, 4, 2


def sequence(length: int) -> TokenizedChat:
    ids = [2 + (7 * length + 5 * position * position) % 250 for position in range(length)]
    return TokenizedChat(ids, [0, 0, *[1] * (length - 2)])


BATCH = [sequence(25), sequence(39)]  # of one micro-batch


def plain(folder: Path, coef: float) -> dict[str, Any]:
    """transformers' model: gradients of the routers [layer][E][H], and the choices of each layer.

    The loss is the mean over the trained tokens, and ``coef`` times Switch Transformer's for each
    layer: E * sum over experts of (share of the choices) * (mean probability).
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    routers: list[list[Any]] = []
    nats, count = torch.zeros(()), 0
    for one in BATCH:
        out = model(torch.tensor([one.token_ids]), output_router_logits=True)
        logprobs = out.logits[0, :-1].log_softmax(-1)
        trained = torch.tensor(one.loss_mask[1:])
        nats = nats - (logprobs.gather(1, torch.tensor(one.token_ids[1:]).unsqueeze(1))[:, 0] * trained).sum()
        count += int(trained.sum())
        routers.append(list(out.router_logits))
    loss, loads = nats / count, []
    for of_layer in zip(*routers, strict=True):
        logits_TE = torch.cat(of_layer)
        chosen_E = torch.zeros(EXPERTS).index_add(0, logits_TE.topk(TOP).indices.flatten(), torch.ones(64 * TOP))
        loads.append(chosen_E.tolist())
        loss = loss + coef * EXPERTS * (chosen_E / chosen_E.sum() * logits_TE.softmax(-1).mean(0)).sum()
    loss.backward()
    gradients = [layer.mlp.gate.weight.grad.tolist() for layer in model.model.layers]
    return {"gradients": gradients, "loads": loads}


def routers_of(engine: Any) -> list[Any]:
    return [module for name, module in engine.module[0].named_modules() if name.endswith(".mlp.router")]


def dtype_of_the_scores(engine: Any) -> str:
    """The number type that a router of the built model computes its logits in."""
    import torch

    router = routers_of(engine)[0]
    return str(router.gating(torch.ones(3, 1, router.weight.shape[1], dtype=router.weight.dtype)).dtype)


def updates_of_rl(folder: Path) -> dict[str, Any]:
    """A step of two updates by RL's worker: the load it reports, and that of each update."""
    from verl.utils import tensordict_utils as tu

    from tests.parity.rl_ranks import RlEngine, rows

    job = {"model": str(folder), "role": "actor", "auto": False, "micro_batch_tokens": 128}
    engine = RlEngine(job)
    load = engine.worker._load
    assert load is not None
    taken: list[dict[str, float]] = []
    pop_metrics = load.pop_metrics
    load.pop_metrics = lambda: taken.append(pop_metrics()) or taken[-1]  # type: ignore[method-assign]
    engine._outputs(rows(0, 1))  # a pass without an update, which counts for nothing
    counted = int(load._counts_LE.sum())
    data = rows(0, 1)
    tu.assign_non_tensor(data, mini_batch_size=8, global_batch_size=8, epochs=1, seed=0, dataloader_kwargs={})
    metrics = tu.get(engine.worker.train_mini_batch(data), "metrics")
    reported = {name: value for name, value in metrics.items() if name.startswith("experts/")}
    left = int(load._counts_LE.sum())
    return {"counted_without_update": counted, "updates": taken, "reported": reported, "left": left}


def found(folder: Path) -> dict[str, Any]:
    from megatron.core import parallel_state

    make_model(folder / "model", "qwen3_moe")
    engine_of = partial(make_engine, folder, SETTINGS)
    out: dict[str, Any] = {"plain": plain(folder / "model", 0.0), "plain_aux": plain(folder / "model", COEF)}
    out["plain_dtype"] = dtype_of_the_scores(engine_of("model.dtype=bfloat16", f"{RAW_ROUTER}=fp64").worker.engine)
    out["dtype"] = dtype_of_the_scores(engine_of("model.dtype=bfloat16").worker.engine)
    for name, changes in (("default", ()), ("aux", AUX)):
        engine = engine_of(*changes)
        inner = engine.worker.engine
        routers, gradients = routers_of(inner), []
        step = inner.optimizer_step

        def look(step: Any = step, routers: Any = routers, gradients: Any = gradients) -> Any:
            gradients += [router.weight.main_grad.tolist() for router in routers]
            return step()

        inner.optimizer_step = look
        out[name] = {"routing_type": routers[0].routing_type, "metrics": engine.train_batch(BATCH)}
        out[name]["gradients"] = gradients
    parallel_state.destroy_model_parallel()
    out["rl"] = updates_of_rl(folder / "model")
    return out


if __name__ == "__main__":
    print_as_one_rank(found)
