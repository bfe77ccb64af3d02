"""What platform cuda changes in other people's code at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from retool_mcore.platforms.patches import Patch

PART_ELEMENTS = 1 << 28  # of one part of an optimizer step: 1 GiB for each float32 copy of a moment


def _step_in_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    """FusedAdam.step over some parameters at a time, where moments are kept in fewer than 32 bits.

    The kernel takes float32 moments, so the original makes a copy of every moment of the group before it starts.
    """

    @wraps(step)
    def stepped(self: Any, closure: Any = None, grad_scaler: Any = None) -> Any:
        if all(str(dtype) == "torch.float32" for dtype in _moment_dtypes(self)):
            return step(self, closure, grad_scaler)
        groups = self.param_groups
        try:
            for group in groups:
                whole, counted = group["params"], {"step": group["step"]} if "step" in group else {}
                try:
                    for part in parts(whole, PART_ELEMENTS):
                        group.pop("step", None)
                        group.update(counted, params=part)  # each part counts the same step
                        self.param_groups = [group]
                        step(self, None, grad_scaler)
                finally:
                    group["params"] = whole
        finally:
            self.param_groups = groups
        return None if closure is None else closure()

    return stepped


def _moment_dtypes(optimizer: Any) -> Iterator[Any]:
    return (optimizer.name_to_dtype_map[name] for name in ("exp_avg", "exp_avg_sq"))


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


PATCHES = (
    Patch(
        target="transformer_engine.pytorch.optimizers.fused_adam.FusedAdam.step",
        replace=_step_in_parts,
        reason="with bfloat16 moments it makes float32 copies of all of them at once: 65 GB a GPU for a 32B model on 4",
        applies_to="transformer-engine>=2.11,<2.17",
        remove_when="Transformer Engine's FusedAdam reads and writes bfloat16 moments in its kernel",
    ),
)
