"""``memory.recompute = "auto"`` in Megatron: the number of recomputed layers, set before each forward pass.

Megatron recomputes as many layers in every micro-batch, so one long sequence in the data slows all short ones down. It
reads these settings anew in each forward pass (transformer_block.py, ``TransformerBlock.forward``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from retool_mcore.activations import layers_to_recompute


def recompute_long_micro_batches(chunks: Sequence[Any], budget_tokens: int, *, rest: float, input_share: float) -> None:
    """Make each of Megatron's model ``chunks`` choose before its forward pass, by the tokens of the micro-batch."""
    for wrapped in chunks:
        chunk = wrapped
        while not hasattr(chunk, "decoder"):  # wrapped for data parallelism, and for 16 bits
            chunk = chunk.module
        choose = partial(_choose, budget_tokens=budget_tokens, rest=rest, input_share=input_share)
        chunk.decoder.register_forward_pre_hook(choose, with_kwargs=True)


def _choose(
    block: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, budget_tokens: int, rest: float, input_share: float
) -> None:
    if not block.training:
        return
    config = block.config
    hidden_T1H = kwargs.get("hidden_states", args[0] if args else None) if block.pre_process else block.input_tensor
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    layers = len(block.layers)
    wanted = layers_to_recompute(hidden_T1H.shape[0] * split, budget_tokens, layers, rest=rest, input_share=input_share)
    config.recompute_granularity = "full" if wanted else None
    config.recompute_method = "block" if wanted else None
    config.recompute_num_layers = min(wanted, layers) if wanted else None
