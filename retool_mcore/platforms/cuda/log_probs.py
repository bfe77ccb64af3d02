"""``memory.fused_cross_entropy``: log-probs and entropies without float32 logits.

This module never converts all logits to float32. It combines two kernels, cuBLAS's GEMM and
Transformer Engine's cross-entropy; tests/parity/cuda_twin.py has CPU versions of both.

Shapes: T tokens, V this rank's part of the vocabulary, H hidden size, R a block of rows (tokens).
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

ROWS = 1024  # number of tokens whose logits are in float32 at a time

_entropy_is_requested: ContextVar[bool] = ContextVar("entropy_is_requested", default=True)


def log_probs_by_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace verl's fused kernel by cuBLAS's GEMM and Transformer Engine's cross-entropy.

    The cross-entropy kernel overwrites the bfloat16 logits with their gradient. This takes 2 bytes
    per logit instead of about 14. verl's kernel still runs if the temperature is not 1 (it
    scales in float32) or the loss has an entropy term (ours has no gradient of entropies).
    """

    @wraps(original)
    def linear_cross_entropy(  # noqa: PLR0917  verl's signature
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        reduction: str,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs of ``labels``, differentiable, and entropies, both float32 [T].

        ``hidden`` is [T, 1, H], ``weight`` [V, H], ``labels`` [T]. Entropies are NaN if the caller
        did not request them.
        """
        entropy_in_loss = _entropy_is_requested.get() and torch.is_grad_enabled()
        if temperature != 1.0 or reduction != "none" or entropy_in_loss:
            return original(hidden, weight, labels, temperature, reduction, group)
        from megatron.core.tensor_parallel.layers import (
            linear_with_frozen_weight,
            linear_with_grad_accumulation_and_async_allreduce,
        )
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        frozen = not weight.requires_grad  # with LoRA
        product = linear_with_frozen_weight if frozen else linear_with_grad_accumulation_and_async_allreduce
        logits_T1V = product(
            input=hidden.view(-1, 1, hidden.shape[-1]),
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=hasattr(weight, "main_grad"),
            allreduce_dgrad=False,  # sequence parallelism sums the gradient where it gathers the hidden states
            sequence_parallel=False,
            tp_group=group,
        )
        logits_TV, labels_1T = logits_T1V.view(-1, logits_T1V.shape[-1]), labels.view(1, -1)
        # Compute entropies first: the cross-entropy kernel overwrites the logits with gradients.
        if _entropy_is_requested.get():
            entropy_T = entropy(logits_TV, group)
        else:
            entropy_T = torch.full(labels_1T.shape[1:], torch.nan, device=labels.device)
        ranks = group if group.size() > 1 else None
        loss_1T = parallel_cross_entropy(
            logits_TV.unsqueeze(0),
            labels_1T,
            dist_process_group=ranks,
            is_cg_capturable=True,  # else the backward pass synchronizes the device to compare the gradient with 1
        )
        return -loss_1T.view(-1), entropy_T

    return linear_cross_entropy


def entropy_on_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's selector of fused forwards, to record whether the caller requests entropies.

    ``log_probs_by_transformer_engine`` reads the record. The log-prob pass before the update
    requests entropies for the metric; the update requests them only if actor.entropy_coeff is set.
    """

    @wraps(original)
    def forward_of(hf_config: Any) -> Callable[..., Any]:
        forward = original(hf_config)

        @wraps(forward)
        def recording_forward(*args: Any, calculate_entropy: bool, **kwargs: Any) -> Any:
            before = _entropy_is_requested.set(calculate_entropy)
            try:
                return forward(*args, calculate_entropy=calculate_entropy, **kwargs)
            finally:
                _entropy_is_requested.reset(before)

        return recording_forward

    return forward_of


def entropy(logits_TV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entropies [T], float32, in nats, over the vocabulary of all ranks; without a gradient."""
    entropies: list[torch.Tensor] = []
    for logits_RV in logits_TV.split(ROWS):
        top_R1 = _reduce(logits_RV.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX, group)
        log_probs_RV = logits_RV.float() - top_R1
        log_probs_RV -= _reduce(log_probs_RV.exp().sum(-1, keepdim=True), dist.ReduceOp.SUM, group).log()
        entropies.append(-_reduce((log_probs_RV.exp() * log_probs_RV).sum(-1), dist.ReduceOp.SUM, group))
    return torch.cat(entropies)


def _reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor
