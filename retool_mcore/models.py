"""What can be known of a model directory before any weight is read: its shape, its tokenizer, its shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.activations import check_recompute, num_experts
from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import CheckpointError, ConfigError


def read_shape(path: str) -> dict[str, Any]:
    """``config.json`` of a local model directory; {} for a hub name, which only the hub can answer for.

    Raises CheckpointError when the directory is not a complete Hugging Face checkpoint.
    """
    folder = Path(path)
    if not folder.exists():
        if path.count("/") == 1 and not path.startswith((".", "/", "runs/")):
            return {}
        raise CheckpointError(
            f"model.path = {path!r} does not exist. Make it first, or name a hub model as owner/name."
        )
    try:
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read as a model's configuration: {error}") from error
    _check_shards(folder)
    return shape


def _check_shards(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the weights {folder / name} are missing or corrupt: {error}") from error


def check_cores(config: RunConfig) -> None:
    """On platform cpu a process needs a core of its own. Raises ConfigError; there is nothing to check elsewhere."""
    cores, processes = os.cpu_count() or 1, config.cluster.gpus_per_node
    if config.run.platform == "cpu" and processes > cores:
        raise ConfigError(
            f"{config.source}: cluster.gpus_per_node = {processes} processes share {cores} cores, and each would wait "
            f"for the others at every step. Use at most {cores}."
        )


def check_model(config: RunConfig) -> None:
    """Does the parallel layout divide the model? Raises ConfigError with the arithmetic."""
    shape = read_shape(config.model.path)
    if not shape:
        return
    heads, layers = shape["num_attention_heads"], shape["num_hidden_layers"]
    kv_heads = shape.get("num_key_value_heads", heads)
    splits = [
        ("parallel.tp", config.parallel.tp, heads, "attention heads"),
        ("parallel.tp", config.parallel.tp, kv_heads, "key-value heads"),
        ("parallel.pp", config.parallel.pp, layers, "layers"),
    ]
    if isinstance(config, RlConfig):
        splits.append(("rollout.engine_tp", config.rollout.engine_tp, heads, "attention heads"))
    for name, ways, count, what in splits:
        if count % ways:
            raise ConfigError(
                f"{config.source}: {name} = {ways} does not divide the {count} {what} of {config.model.path}."
            )
    experts = num_experts(shape)
    if config.parallel.ep > 1 and (not experts or experts % config.parallel.ep):
        raise ConfigError(
            f"{config.source}: parallel.ep = {config.parallel.ep} spreads experts, and {config.model.path} has "
            f"{experts or 'none'}. Set parallel.ep to a number that divides them; 1 for a dense model."
        )
    if experts and config.parallel.tp > 1 and not config.parallel.sequence_parallel:
        raise ConfigError(
            f"{config.source}: parallel.tp = {config.parallel.tp} with parallel.sequence_parallel = false, and "
            f"{config.model.path} has {experts} experts: Megatron trains experts under TP with sequence parallelism "
            "only. Leave it on."
        )
    if experts and isinstance(config, RlConfig):
        _check_old_log_prob(config)
    longest = shape.get("max_position_embeddings")
    wanted = config.max_sequence_tokens
    if longest is not None and wanted > longest:
        raise ConfigError(
            f"{config.source}: sequences of {wanted} tokens exceed max_position_embeddings = {longest} of "
            f"{config.model.path}."
        )
    check_recompute(config, shape)


def _check_old_log_prob(config: RlConfig) -> None:
    a = config.algorithm
    if a.old_log_prob == "rollout" and a.importance_sampling == "off":
        raise ConfigError(
            f'{config.source}: algorithm.old_log_prob = "rollout", and {config.model.path} has experts, which engine '
            'and actor choose differently for some tokens. Set algorithm.importance_sampling = "token", or '
            'old_log_prob = "actor".'
        )


def train_flops(shape: Mapping[str, Any], lengths: Sequence[int]) -> float:
    """Model FLOPs of one forward and backward pass over sequences of ``lengths`` tokens: what MFU counts.

    ``6 N T``, with N the weights that multiply (the embedding table is looked up, not multiplied; of experts, those a
    token is routed to), plus ``6 L heads head_dim T^2`` a sequence for causal attention. Recomputation is not counted.
    Source: PaLM (arXiv 2204.02311), appendix B, with half of its attention term, as causal attention computes half.
    """
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads") or heads
    head_dim = shape.get("head_dim") or hidden // heads
    if experts := num_experts(shape):
        mlp = 3 * hidden * shape["moe_intermediate_size"] * shape["num_experts_per_tok"]
        mlp += hidden * experts  # the router
    else:
        mlp = 3 * hidden * shape["intermediate_size"]
    weights = layers * (hidden * head_dim * 2 * (heads + kv_heads) + mlp) + hidden * shape["vocab_size"]
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    return 6.0 * weights * tokens + 6.0 * layers * heads * head_dim * squares
