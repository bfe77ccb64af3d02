"""Computes how many layers to recompute for long sequences (``memory.recompute = "auto"``).

A micro-batch of train.micro_batch_tokens fits without recomputation. A longer sequence needs a
larger micro-batch, which recomputes just enough layers to stay within the same memory.
Micro-batches within the budget recompute nothing.
"""

from math import ceil

from retool_mcore.model.shape import ModelShape

LOGIT_BYTES = 4  # per logit, over forward and backward pass, with memory.fused_cross_entropy (measured)
PLAIN_LOGIT_BYTES = 14  # the same without memory.fused_cross_entropy


def layers_to_recompute(tokens: int, budget_tokens: int, layers: int, *, rest: float, input_share: float) -> int:
    """How many of ``layers`` to recompute so that ``tokens`` fit the memory of ``budget_tokens``.

    ``budget_tokens``: the tokens that fit without recomputation. ``rest``: a token's memory other
    than its layers' activations, as a multiple of one layer's. ``input_share``: the fraction of a
    layer's activations that is its input, which a recomputed layer keeps. A result above ``layers``
    means that the tokens do not fit.
    """
    if tokens <= budget_tokens:
        return 0
    return ceil((layers + rest) * (1 - budget_tokens / tokens) / (1 - input_share))


def token_memory(shape: ModelShape, *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``rest`` and ``input_share`` of a model. ``rest`` includes the layer being recomputed."""
    logit_bytes = LOGIT_BYTES if fused_cross_entropy else PLAIN_LOGIT_BYTES
    return 1 + logit_bytes * shape.vocab / shape.kept_bytes, 2 * shape.hidden / shape.kept_bytes


def micro_batch_tokens(usual_tokens: int, longest_tokens: int, cp: int) -> int:
    """A rank's micro-batch budget in tokens: ``usual_tokens``, or more for a longer sequence."""
    return max(usual_tokens, ceil(longest_tokens / cp))
