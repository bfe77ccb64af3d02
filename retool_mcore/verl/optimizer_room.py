"""Holds the memory of Adam's states from the start, before an engine measures what is free.

Adam makes its moments in the first update. SGLang takes its share of the memory that is free when
it starts, long before that: without this room the first update would take what the engine counts on
when it wakes up, and the run would end there. Seen with 7 B parameters on one H200: 43 GiB.
"""

from __future__ import annotations

from typing import Any

import torch

ADAM_MOMENTS = 2 * 4  # bytes a parameter, float32


def bytes_to_come(optimizer: Any) -> int:
    """Bytes of the states that Megatron's optimizer makes in its first update, of this rank.

    Without the precision-aware optimizer the float32 master weights exist from the start; with it
    they are states, too.
    """
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        config, inner = part.config, part.optimizer
        if inner is None or config.optimizer_cpu_offload:
            continue
        each = ADAM_MOMENTS
        if config.use_precision_aware_optimizer:
            master = torch.int16 if config.store_param_remainders else config.main_params_dtype
            each = sum(dtype.itemsize for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype, master))
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        total += each * sum(parameter.numel() for parameter in parameters if not inner.state.get(parameter))
    return total


def hold(optimizer: Any) -> torch.Tensor | None:
    """As many bytes on the optimizer's device; torch gives them to the states when it is freed.

    None where the optimizer has all of its states.
    """
    if not (wanted := bytes_to_come(optimizer)):
        return None
    return torch.empty(wanted, dtype=torch.uint8, device=optimizer.param_groups[0]["params"][0].device)
