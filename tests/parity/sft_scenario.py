"""Run by test_sft_engine.py in its own process: the real SftEngine on a tiny model, one rank.

Prints one JSON object: what the optimizer, the loss and each forward pass saw, and what plain
transformers computes.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.chat import TokenizedChat
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms import get_platform
from retool_mcore.run import heartbeat
from tests.parity.rl_ranks import watched
from tests.scenario import print_as_one_rank

SFT = Path(__file__).parents[2] / "configs" / "sft_tiny_cpu.toml"
SETTINGS = ("cluster.gpus_per_node=1", "data.max_length_tokens=200", "train.steps=8", "train.global_batch=4")
SETTINGS += ("train.micro_batch_tokens=64", "memory.recompute=auto", "optim.lr=0.01", "optim.min_lr=0.001")
SETTINGS += ("optim.schedule=cosine", "optim.warmup_fraction=0.25", "optim.weight_decay=0.07", "optim.clip_grad=0.05")


def sequence(length: int, trained: range) -> TokenizedChat:
    ids = [(7 * length + 3 * position) % 200 for position in range(length)]
    return TokenizedChat(ids, [int(position in trained) for position in range(length)])


# One sequence is longer than a micro-batch's budget; the last is hardly trained on.
BATCH = [
    sequence(100, range(40, 100)),
    sequence(20, range(5, 15)),
    sequence(21, range(1, 21)),
    sequence(22, range(20, 21)),
]
VALIDATION = [[BATCH[1], BATCH[3]], [BATCH[0]]]  # 10 + 1 and 60 trained tokens


def nats(model: Any, sequences: list[TokenizedChat]) -> tuple[float, int]:
    """Sum over the trained tokens, each given those before it, and their number."""
    import torch

    total, count = 0.0, 0
    for one in sequences:
        with torch.no_grad():
            logprobs = model(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        for position, (token, trained) in enumerate(zip(one.token_ids, one.loss_mask, strict=True)):
            if trained:
                total -= float(logprobs[position - 1, token])
                count += 1
    return total, count


def moments_norm(engine: Any) -> float:
    """Of what Adam took for the gradient in its first update: its first moments / (1 - beta1)."""
    total = 0.0
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        adam = part.optimizer
        for group in adam.param_groups:
            for param in group["params"]:
                total += float((adam.state[param]["exp_avg"] / (1 - group["betas"][0])).square().sum())
    return math.sqrt(total)


def make_engine(folder: Path, usual: Sequence[str], *changes: str, model: str = "model") -> Any:
    """SFT's engine with these settings, in the place of the one before."""
    from megatron.core import parallel_state

    from retool_mcore.verl.keys.tree import sft_worker_config
    from retool_mcore.verl.sft_engine import SftEngine, megatron_worker

    parallel_state.destroy_model_parallel()
    settings = [*usual, f"model.path={folder}/{model}", f"run.root={folder}", *changes]
    config, platform = load_config(SftConfig, SFT, settings), get_platform("cpu")
    return SftEngine(megatron_worker(config, sft_worker_config(config, platform)), config, platform)


def found(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from retool_mcore.verl.checkpoint import load_checkpoint

    write_model(folder / "model", build_tokenizer(tokenizer_rows()), seed=0)
    plain = AutoModelForCausalLM.from_pretrained(folder / "model").float()
    engine_of = partial(make_engine, folder, SETTINGS)
    engine = engine_of()
    inner = engine.worker.engine
    heartbeat.EVERY_S = 0.0
    heartbeat.start(folder)
    out: dict[str, Any] = {"validation": engine.validation_loss(VALIDATION)}
    out["alive"] = [(folder / heartbeat.FILE).exists()]
    (folder / heartbeat.FILE).unlink()
    out["plain_validation"] = [nats(plain, sequences) for sequences in VALIDATION]
    out["plain_batch"] = nats(plain, BATCH)
    forwards = watched(inner)
    out["steps"] = [engine.train_batch(BATCH)]
    out["alive"].append((folder / heartbeat.FILE).exists())
    out["forwards"] = list(forwards)
    out["moments_norm"] = moments_norm(inner)
    out["weight_decay"] = weight_decay(inner)
    out["steps"] += [engine.train_batch(BATCH) for _ in range(3)]
    engine.save(str(folder / "saved"), 4)
    out["steps"] += [engine.train_batch(BATCH) for _ in range(4)]
    for name, changes in (("same", ()), ("changed", ("optim.lr=0.004", "optim.min_lr=0", "optim.weight_decay=0.5"))):
        again = engine_of(*changes)
        load_checkpoint(again.worker.engine, str(folder / "saved"))
        out[name] = [again.train_batch(BATCH) for _ in range(4)]
        out[f"{name}_weight_decay"] = weight_decay(again.worker.engine)
    return out


def weight_decay(engine: Any) -> list[float]:
    return sorted({group["weight_decay"] for group in engine.optimizer.param_groups})


if __name__ == "__main__":
    print_as_one_rank(found)
