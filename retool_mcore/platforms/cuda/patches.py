"""What platform cuda changes in other people's code at run time."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from retool_mcore.platforms.call_end import CALL_END_PATCH
from retool_mcore.platforms.cuda.log_probs import entropy_where_asked, log_probs_by_transformer_engine
from retool_mcore.platforms.engine_patches import ENGINE_PATCHES
from retool_mcore.platforms.patches import Patch, Seam
from retool_mcore.platforms.prefills import PREFILL_PATCH
from retool_mcore.platforms.versions import requirement
from retool_mcore.platforms.weight_sums import WEIGHT_SUMS_PATCH

PART_ELEMENTS = 1 << 28  # in one part of an optimizer step: 1 GiB for each float32 copy of a moment


def step_in_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    """FusedAdam.step over some parameters at a time, if moments have fewer than 32 bits.

    The kernel takes float32 moments, so the original first copies every moment of the group.
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
    """The parameters in order, in lists of at most ``max_elements`` elements or one parameter."""
    part: list[Any] = []
    for param in params:
        if part and sum(each.numel() for each in part) + param.numel() > max_elements:
            yield part
            part = []
        part.append(param)
    if part:
        yield part


def _without_host_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def region(self: Any, tag: str, enable_cpu_backup: bool = False) -> Any:
        del enable_cpu_backup
        return original(self, tag)

    return region


# memory.fused_cross_entropy
LOG_PROB_PATCHES = (
    Patch(
        target="verl.models.mcore.model_forward_fused.linear_cross_entropy",
        replace=log_probs_by_transformer_engine,
        reason="verl's kernel computes the output layer twice more, slower than cuBLAS; its plain path copies logits",
        applies_to=requirement("verl"),
        remove_when="verl takes log-probabilities by a kernel that neither copies nor recomputes the logits",
    ),
    Patch(
        target="verl.models.mcore.get_mcore_forward_fused_model_engine_fn",
        replace=entropy_where_asked,
        reason="verl's fused forward takes entropies whether or not they are asked for, and does not say which",
        applies_to=requirement("verl"),
        remove_when="verl hands calculate_entropy on to linear_cross_entropy",
    ),
)

# Processes that train with Megatron.
TRAINING_PATCHES = (
    *ENGINE_PATCHES,
    Patch(
        target="transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
        replace=step_in_parts,
        reason="with bfloat16 moments it makes float32 copies of all of them at once: 65 GB a GPU for a 32B model on 4",
        applies_to=requirement("transformer-engine"),
        remove_when="Transformer Engine's FusedAdam reads and writes bfloat16 moments in its kernel",
    ),
    *LOG_PROB_PATCHES,
)

# SGLang's processes.
SGLANG_PATCHES = (
    CALL_END_PATCH,
    PREFILL_PATCH,
    WEIGHT_SUMS_PATCH,
    Patch(
        target="sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.region",
        replace=_without_host_copy,
        reason="verl has an engine that goes to sleep copy its weights to the host, pinned and freed again each time, "
        "though the weight sync that wakes it overwrites them all",
        applies_to=requirement("sglang"),
        remove_when="verl starts colocated engines with enable_weights_cpu_backup = False",
    ),
)

SEAMS = (
    Seam(
        target="torch.cuda.memory._set_allocator_settings",
        parameters=("env",),
        reason="packed batches differ in length each step, and segments that cannot grow fragment",
        applies_to=requirement("torch"),
        remove_when="torch offers the allocator's settings to a running process",
    ),
    *(
        Seam(
            target=f"sglang.jit_kernel.{target}",
            parameters=parameters,
            reason="the kernels of an engine's first graph are compiled side by side, before it needs them",
            applies_to=requirement("sglang"),
            remove_when="SGLang compiles its kernels side by side, or ships them compiled",
        )
        for target, parameters in {
            "rope._jit_fused_rope_module": ("is_neox", "rope_dim", "dtype"),
            "activation._jit_activation_module": ("dtype",),
            "clamp_position._jit_clamp_position_module": ("dtype",),
        }.items()
    ),
)
