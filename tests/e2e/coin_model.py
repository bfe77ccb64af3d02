"""A model that answers 1 or 2 by the toss of a coin: the real architecture, its weights written by
hand.

Attention and feed-forward add nothing, so the next token hangs on the last one alone: embeddings
are unit vectors, the head holds the transitions. Half of the answers are right where the truth is
1, without any training, so that groups, advantages and filters have something to work with.
Training moves these weights as it moves any others.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from retool_mcore.data.files import write_parquet
from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows

SURE = 2.0  # weight of a transition; the norm before the head gives every state the length sqrt(128) = 11.3
PROMPTS = 64


def write_coin_task(folder: Path, *, calls: bool = False, repeat_wrong: int = 0) -> tuple[str, ...]:
    """Model and data in ``folder``; returns the settings that name them.

    The model samples ``\\boxed{1}`` or ``\\boxed{2}``; with ``calls``, half of the time first
    something that mostly is a call in the paper's form. ``repeat_wrong``: a wrong answer's 2 is
    repeated so many times on average.
    """
    tokenizer, end = build_tokenizer(tokenizer_rows()), "<|im_end|>"
    texts = [f"\\boxed{{1}}{end}", f"\\boxed{{2}}{end}", *(["<code>print(7)</code>"] if calls else [])]
    (start,) = tokenizer.encode("\n", add_special_tokens=False)
    write_model(folder / "model", tokenizer, seed=0)
    following: dict[int, dict[int, float]] = {}
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for token_id, then in pairwise([start, *ids]):
            following.setdefault(token_id, {})[then] = SURE
    if repeat_wrong:
        (two,) = tokenizer.encode("2", add_special_tokens=False)
        following[two][two] = SURE + math.log(repeat_wrong) / math.sqrt(128)
    (end_id,) = tokenizer.encode(end, add_special_tokens=False)
    _write_transitions(folder / "model" / "model.safetensors", following, end_id)
    for split in ("train", "val"):
        questions = [f"Heads or tails, {split} toss {number}?" for number in range(PROMPTS if split == "train" else 2)]
        rows = [
            {
                "data_source": "coin",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"ground_truth": "1", "style": "rule"},
                "extra_info": {"index": index},
            }
            for index, question in enumerate(questions)
        ]
        write_parquet(folder / f"{split}.parquet", rows)
    files = (f"data.train_file={folder}/train.parquet", f'validation.files=["{folder}/val.parquet"]')
    return (f"model.path={folder}/model", *files)


def _write_transitions(path: Path, following: Mapping[int, Mapping[int, float]], end_id: int) -> None:
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            weight.zero_()
    states, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    states[:, 0] = 1.0  # any token that no text above holds: the turn ends
    head[end_id, 0] = SURE
    for state, (token_id, nexts) in enumerate(following.items(), start=1):
        states[token_id] = torch.zeros(states.shape[1])
        states[token_id, state] = 1.0
        for then, weight in nexts.items():
            head[then, state] = weight
    save_file(weights, path, metadata={"format": "pt"})


# Settings under which two ranks hold two whole experts of ``give_experts`` each.
WHOLE_UNDER_TP = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=1")


def give_experts(folder: Path) -> None:
    """Make the model in ``folder`` one with experts, of which the answers depend a little.

    The transitions stay; each layer adds what two of four experts, by the token, make of it.
    """
    import transformers

    coin = load_file(folder / "model.safetensors")
    known = transformers.AutoConfig.from_pretrained(folder).to_dict()
    shape = {name: value for name, value in known.items() if name not in ("architectures", "model_type", "layer_types")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**shape, **experts, "head_dim": 64, "initializer_range": 0.04})
    model = transformers.Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.zero_()
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.copy_(coin[name])
    model.save_pretrained(folder)
