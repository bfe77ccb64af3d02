"""Adam's step in parts, for `cuda`.

patches_verl.py and patches_sglang.py have more CUDA patches.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from retool_mcore.platforms.patches import Change, Patch, Seam, requirement

PART_ELEMENTS = 1 << 28  # elements per part: 1 GiB for each float32 copy of a moment


def step_in_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap FusedAdam.step to process a few parameters at a time, if moments are not float32.

    The kernel needs float32 moments, so the original converts all moments of a group at once.
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
            group.update(counted, params=part)  # each part starts from the same step count
            step()
    finally:
        group["params"] = whole


def parts(params: Sequence[Any], max_elements: int) -> Iterator[list[Any]]:
    """Split ``params`` in order into lists of at most ``max_elements`` elements, or 1 parameter."""
    part: list[Any] = []
    for param in params:
        if part and sum(earlier.numel() for earlier in part) + param.numel() > max_elements:
            yield part
            part = []
        part.append(param)
    if part:
        yield part


ADAM_PATCH = Patch(
    changes=(
        Change(
            "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
            ("self", "closure", "grad_scaler"),
            step_in_parts,
        ),
    ),
    reason="with bfloat16 moments FusedAdam makes float32 copies of all of them at once",
    gain="The optimizer step of a 32B model on 4 GPUs needs 65 GB less per GPU",
    applies_to=requirement("transformer-engine"),
    remove_when="Transformer Engine's FusedAdam reads and writes bfloat16 moments in its kernel",
)

SEAMS = (
    Seam(
        targets=("torch.cuda.memory._set_allocator_settings",),
        parameters=("env",),
        reason="packed batches differ in length at each step, which fragments memory segments of fixed size",
        applies_to=requirement("torch"),
        remove_when="torch offers the allocator's settings to a running process",
    ),
)
