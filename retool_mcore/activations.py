"""``memory.recompute = "auto"``: how many layers a micro-batch recomputes, so that a long sequence still fits.

train.micro_batch_tokens is what fits with all activations kept. A longer sequence makes a longer micro-batch, in which
as many layers are recomputed as bring it back to the same memory; shorter ones lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from retool_mcore.config import RlConfig, RunConfig, SftConfig
from retool_mcore.errors import ConfigError

LOGIT_BYTES = 4  # of one token's logit over forward and backward pass, with memory.fused_cross_entropy; measured
PLAIN_LOGIT_BYTES = 14  # without


def layers_to_recompute(tokens: int, budget_tokens: int, layers: int, *, rest: float, input_share: float) -> int:
    """How many of ``layers`` to recompute, so that ``tokens`` take no more memory than ``budget_tokens`` without.

    ``rest``: what a token takes beside its layers' activations, in layers. ``input_share``: a recomputed layer keeps
    its input, so much of its activations. May be more than ``layers``: then it does not fit.
    """
    if tokens <= budget_tokens:
        return 0
    return ceil((layers + rest) * (1 - budget_tokens / tokens) / (1 - input_share))


def layer_bytes(*, hidden: int, attended: int, kv: int, ffn: int) -> int:
    """Bytes in bfloat16 that one layer with fused kernels keeps of a token for its backward pass.

    The inputs of both norms, q, k, v, the attention's output, and three of the MLP's width: the gate's and the
    up-projection's output, and their product. ``attended``, ``kv``: heads and key-value heads, times their size.
    """
    return 2 * (2 * hidden + 2 * attended + 2 * kv + 3 * ffn)


def num_experts(shape: Mapping[str, Any]) -> int:
    """Of one layer, from a Hugging Face configuration; 0 for a dense model.

    Published files say num_experts; transformers 5 writes num_local_experts in its place.
    """
    return shape.get("num_experts") or shape.get("num_local_experts") or 0


def token_memory(shape: Mapping[str, Any], *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``rest`` and ``input_share`` of a model, from its Hugging Face configuration.

    One layer is whole while it is recomputed.
    """
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    kv_heads = shape.get("num_key_value_heads") or heads
    ffn = shape["intermediate_size"]
    if num_experts(shape):
        ffn = shape["moe_intermediate_size"] * shape["num_experts_per_tok"]
    kept = layer_bytes(hidden=hidden, attended=heads * head_dim, kv=kv_heads * head_dim, ffn=ffn)
    return rest_and_input(kept, hidden, shape["vocab_size"], fused_cross_entropy=fused_cross_entropy)


def rest_and_input(kept: int, hidden: int, vocab: int, *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``token_memory`` from the bytes that one layer keeps of a token."""
    logit_bytes = LOGIT_BYTES if fused_cross_entropy else PLAIN_LOGIT_BYTES
    return 1 + logit_bytes * vocab / kept, 2 * hidden / kept


def micro_batch_tokens(usual_tokens: int, longest_tokens: int, cp: int) -> int:
    """The budget of one rank's micro-batches, ``usual_tokens`` unless the batch has a longer sequence."""
    return max(usual_tokens, ceil(longest_tokens / cp))


def check_recompute(config: RunConfig, shape: Mapping[str, Any]) -> None:
    """Raise ConfigError when the longest sequence does not fit with all layers recomputed."""
    if config.memory.recompute != "auto":
        return
    assert isinstance(config, SftConfig | RlConfig), "a run is one of both"
    usual_tokens, longest_tokens = config.train.micro_batch_tokens, config.max_sequence_tokens
    layers = shape["num_hidden_layers"] // (config.parallel.pp * config.parallel.vpp)
    rest, input_share = token_memory(shape, fused_cross_entropy=config.memory.fused_cross_entropy)
    tokens = micro_batch_tokens(usual_tokens, longest_tokens, config.parallel.cp)
    needed = layers_to_recompute(tokens, usual_tokens, layers, rest=rest, input_share=input_share)
    if needed > layers:
        least = ceil(tokens * (1 - layers * (1 - input_share) / (layers + rest)))
        limit = "data.max_prompt_tokens + rollout.max_response_tokens"
        limit = "data.max_length_tokens" if isinstance(config, SftConfig) else limit
        raise ConfigError(
            f'{config.source}: memory.recompute = "auto" and {limit} = {longest_tokens}: a rank\'s {tokens} '
            f"tokens take more memory with all {layers} layers of a stage recomputed than train.micro_batch_tokens = "
            f"{usual_tokens} without. Raise it to {least}, or parallel.cp."
        )
