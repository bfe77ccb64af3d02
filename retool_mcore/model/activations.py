"""``memory.recompute = "auto"``: how many layers a micro-batch recomputes, so that a long sequence
still fits.

train.micro_batch_tokens is what fits with all activations kept. A longer sequence makes a longer
micro-batch, in which as many layers are recomputed as bring it back to the same memory; shorter
ones lose nothing.
"""

from __future__ import annotations

from math import ceil

from retool_mcore.model.shape import ModelShape

LOGIT_BYTES = 4  # of one token's logit over forward and backward pass, with memory.fused_cross_entropy; measured
PLAIN_LOGIT_BYTES = 14  # without


def layers_to_recompute(tokens: int, budget_tokens: int, layers: int, *, rest: float, input_share: float) -> int:
    """How many of ``layers`` to recompute, so that ``tokens`` take no more memory than
    ``budget_tokens`` without.

    ``rest``: what a token takes beside its layers' activations, in layers. ``input_share``: a
    recomputed layer keeps its input, so much of its activations. May be more than ``layers``: then
    it does not fit.
    """
    if tokens <= budget_tokens:
        return 0
    return ceil((layers + rest) * (1 - budget_tokens / tokens) / (1 - input_share))


def token_memory(shape: ModelShape, *, fused_cross_entropy: bool) -> tuple[float, float]:
    """``rest`` and ``input_share`` of a model. One layer is whole while it is recomputed."""
    logit_bytes = LOGIT_BYTES if fused_cross_entropy else PLAIN_LOGIT_BYTES
    return 1 + logit_bytes * shape.vocab / shape.kept_bytes, 2 * shape.hidden / shape.kept_bytes


def micro_batch_tokens(usual_tokens: int, longest_tokens: int, cp: int) -> int:
    """The budget of one rank's micro-batches, ``usual_tokens`` unless the batch has a longer
    sequence.
    """
    return max(usual_tokens, ceil(longest_tokens / cp))
