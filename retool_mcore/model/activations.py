"""``memory.recompute = "auto"``: how many layers to recompute so that a long sequence still fits.

A micro-batch of train.micro_batch_tokens fits with all activations kept. A longer sequence makes a
longer micro-batch, and just enough of its layers are recomputed to stay within the same memory.
Micro-batches within the budget recompute nothing.
"""

from math import ceil

from retool_mcore.model.shape import ModelShape

LOGIT_BYTES = 4  # per logit, over forward and backward pass, with memory.fused_cross_entropy; measured
PLAIN_LOGIT_BYTES = 14  # without


def layers_to_recompute(tokens: int, budget_tokens: int, layers: int, *, rest: float, input_share: float) -> int:
    """How many of ``layers`` to recompute, so that ``tokens`` need the memory of ``budget_tokens``.

    ``budget_tokens`` is what fits without recomputation. ``rest`` is the memory that a token takes
    besides its layers' activations, in units of one layer's. ``input_share`` is the part of a
    layer's activations that is its input, which a recomputed layer keeps. When the result exceeds
    ``layers``, the tokens do not fit.
    """
    if tokens <= budget_tokens:
        return 0
    return ceil((layers + rest) * (1 - budget_tokens / tokens) / (1 - input_share))


def token_memory(shape: ModelShape, *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``rest`` and ``input_share`` of a model; ``rest`` includes the layer being recomputed."""
    logit_bytes = LOGIT_BYTES if fused_cross_entropy else PLAIN_LOGIT_BYTES
    return 1 + logit_bytes * shape.vocab / shape.kept_bytes, 2 * shape.hidden / shape.kept_bytes


def micro_batch_tokens(usual_tokens: int, longest_tokens: int, cp: int) -> int:
    """A rank's micro-batch budget: ``usual_tokens``, or more if the batch has a longer sequence."""
    return max(usual_tokens, ceil(longest_tokens / cp))
