"""Plain-torch twins of the kernels under platform cuda's fused cross-entropy, so that its formulas
run on a CPU.

Written from what the kernels are documented to do: Transformer Engine's cross-entropy leaves its
gradient where the logits were, apex's product adds to the gradient buffer, and verl's kernel scales
the logits by the temperature.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

CROSS_ENTROPY = "transformer_engine.pytorch.cross_entropy"


class _CrossEntropy(torch.autograd.Function):
    """-log_softmax at the labels in float32, of a vocabulary spread over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor, group: Any) -> torch.Tensor:
        def over(tensor: torch.Tensor, op: Any) -> torch.Tensor:
            if group is not None:
                dist.all_reduce(tensor, op=op, group=group)
            return tensor

        first = logits_TV.shape[-1] * (dist.get_rank(group) if group is not None else 0)
        here_T = (labels_T >= first) & (labels_T < first + logits_TV.shape[-1])
        index_T1 = (labels_T - first).clamp(0, logits_TV.shape[-1] - 1)[:, None]
        top_T1 = over(logits_TV.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX)
        exps_TV = (logits_TV.float() - top_T1).exp()
        sums_T1 = over(exps_TV.sum(-1, keepdim=True), dist.ReduceOp.SUM)
        labelled_T = over(logits_TV.float().gather(-1, index_T1)[:, 0] * here_T, dist.ReduceOp.SUM)
        gradient_TV = exps_TV / sums_T1
        gradient_TV.scatter_add_(-1, index_T1, -here_T[:, None].float())
        logits_TV.data.copy_(gradient_TV)
        ctx.save_for_backward(logits_TV.detach())
        return sums_T1.log()[:, 0] + top_T1[:, 0] - labelled_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_TV,) = ctx.saved_tensors
        return (gradient_TV * grad_T[:, None]).to(gradient_TV.dtype), None, None


def parallel_cross_entropy(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, *, dist_process_group: Any = None, is_cg_capturable: bool = False
) -> torch.Tensor:
    assert is_cg_capturable, "else the real one reads the gradient on the host in each backward pass"
    batch, tokens, vocab = logits_BTV.shape
    loss_N = _CrossEntropy.apply(logits_BTV.view(-1, vocab), labels_BT.reshape(-1), dist_process_group)
    return loss_N.view(batch, tokens)


def linear_cross_entropy(  # noqa: PLR0917  verl calls it so
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, reduction: str, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's kernel: (log_probs_T, entropy_T); one rank's vocabulary is all of it."""
    assert reduction == "none" and group.size() == 1
    logits_TV = hidden.view(-1, hidden.shape[-1]).float() @ weight.float().t() / temperature
    log_probs_TV = torch.log_softmax(logits_TV, -1)
    entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
    return log_probs_TV.gather(-1, labels.view(-1, 1))[:, 0], entropy_T


class _Product:
    """apex's fused_weight_gradient_mlp_cuda."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TH: torch.Tensor, grad_TO: torch.Tensor, main_grad_OH: torch.Tensor) -> None:
        main_grad_OH += grad_TO.float().t() @ input_TH.float()


def transformer_engine_module() -> ModuleType:
    module = ModuleType(CROSS_ENTROPY)
    module.__dict__["parallel_cross_entropy"] = parallel_cross_entropy
    return module


def install() -> None:
    """Give this process platform cuda's fused cross-entropy on these twins."""
    from megatron.core.tensor_parallel import layers
    from verl.models.mcore import model_forward_fused

    from retool_mcore.platforms.patches_verl import LOG_PROB_PATCH

    sys.modules[CROSS_ENTROPY] = transformer_engine_module()
    layers.__dict__["fused_weight_gradient_mlp_cuda"] = _Product
    if not LOG_PROB_PATCH.applied:
        model_forward_fused.__dict__["linear_cross_entropy"] = linear_cross_entropy
        LOG_PROB_PATCH.apply()
