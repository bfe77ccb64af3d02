"""What platform cuda changes in other people's code at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from retool_mcore.platforms.engine_patches import ENGINE_PATCHES
from retool_mcore.platforms.patches import Patch

PART_ELEMENTS = 1 << 28  # of one part of an optimizer step: 1 GiB for each float32 copy of a moment
ENTROPY_ROWS = 1024  # tokens whose logits are in float32 at a time


def _step_in_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    """FusedAdam.step over some parameters at a time, where moments are kept in fewer than 32 bits.

    The kernel takes float32 moments, so the original makes a copy of every moment of the group before it starts.
    """

    @wraps(step)
    def stepped(self: Any, closure: Any = None, grad_scaler: Any = None) -> Any:
        if all(self.name_to_dtype_map[name] == torch.float32 for name in ("exp_avg", "exp_avg_sq")):
            return step(self, closure, grad_scaler)
        loss = None if closure is None else closure()
        groups = self.param_groups
        try:
            for group in groups:
                _step_group(self, group, lambda: step(self, None, grad_scaler))
        finally:
            self.param_groups = groups
        return loss

    return stepped


def _step_group(optimizer: Any, group: dict[str, Any], step: Callable[[], Any]) -> None:
    whole, counted = group["params"], {name: group[name] for name in ("step",) if name in group}
    optimizer.param_groups = [group]
    try:
        for part in parts(whole, PART_ELEMENTS):
            group.pop("step", None)
            group.update(counted, params=part)  # every part counts the same step
            step()
    finally:
        group["params"] = whole


def parts(params: Sequence[Any], max_elements: int) -> Iterator[list[Any]]:
    """The parameters in order, in lists of at most ``max_elements`` elements or of one parameter."""
    part: list[Any] = []
    for param in params:
        if part and sum(each.numel() for each in part) + param.numel() > max_elements:
            yield part
            part = []
        part.append(param)
    if part:
        yield part


def _log_probs_by_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's fused forward with cuBLAS for the output layer and Transformer Engine's kernel for the cross-entropy.

    The kernel writes the gradient over the bfloat16 logits, so no float32 copy of them is made: 2 bytes a logit in
    place of about 14. At a temperature other than 1 verl's own kernel is called, which scales in float32.
    """

    @wraps(original)
    def linear_cross_entropy(  # noqa: PLR0917  verl calls it so
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        reduction: str,
        group: torch.distributed.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_probs_T, entropy_T) float32 of labels [T], from hidden [T, 1, H] and this rank's weight [V / tp, H].

        Entropy is for metrics: it is taken where no gradient is, and is NaN elsewhere, so that a loss that used it
        would stop the run.
        """
        if temperature != 1.0 or reduction != "none":
            return original(hidden, weight, labels, temperature, reduction, group)
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        logits_TV = linear_with_grad_accumulation_and_async_allreduce(
            input=hidden.view(-1, 1, hidden.shape[-1]),
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=hasattr(weight, "main_grad"),
            allreduce_dgrad=False,  # sequence parallel: the gradient is summed where the hidden states were gathered
            sequence_parallel=False,
            tp_group=group,
        )
        logits_1TV, labels_1T = logits_TV.view(1, -1, logits_TV.shape[-1]), labels.view(1, -1)
        entropy_T = _entropy(logits_1TV[0])
        loss_1T = parallel_cross_entropy(logits_1TV, labels_1T, dist_process_group=group if group.size() > 1 else None)
        return -loss_1T.view(-1), entropy_T

    return linear_cross_entropy


def _entropy(logits_TV: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return torch.full(logits_TV.shape[:1], torch.nan, device=logits_TV.device)
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy

    return torch.cat([vocab_parallel_entropy(rows.float()) for rows in logits_TV.split(ENTROPY_ROWS)])


def _without_host_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def region(self: Any, tag: str, enable_cpu_backup: bool = False) -> Any:
        del enable_cpu_backup
        return original(self, tag)

    return region


TRANSFORMER_ENGINE = "transformer-engine>=2.11,<2.17"

# Processes that train with Megatron.
TRAINING_PATCHES = (
    *ENGINE_PATCHES,
    Patch(
        target="transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
        replace=_step_in_parts,
        reason="with bfloat16 moments it makes float32 copies of all of them at once: 65 GB a GPU for a 32B model on 4",
        applies_to=TRANSFORMER_ENGINE,
        remove_when="Transformer Engine's FusedAdam reads and writes bfloat16 moments in its kernel",
    ),
    Patch(
        target="verl.models.mcore.model_forward_fused.linear_cross_entropy",
        replace=_log_probs_by_transformer_engine,
        reason="verl's kernel computes the output layer twice more, slower than cuBLAS; its plain path copies logits",
        applies_to="verl==0.9.1",
        remove_when="verl takes log-probabilities by a kernel that neither copies nor recomputes the logits",
    ),
)

# SGLang's processes.
SGLANG_PATCHES = (
    Patch(
        target="sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.region",
        replace=_without_host_copy,
        reason="verl has an engine that goes to sleep copy its weights to the host, pinned and freed again each time, "
        "though the weight sync that wakes it overwrites them all",
        applies_to="sglang>=0.5.12,<0.5.13",
        remove_when="verl starts colocated engines with enable_weights_cpu_backup = False",
    ),
)
