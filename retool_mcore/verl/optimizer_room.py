"""Holds the memory of Adam's states from the start, before an engine measures what is free.

Adam makes its moments in the first update. SGLang takes its share of the memory that is free when
it starts, long before that: without this room the first update would take what the engine counts on
when it wakes up, and the run would end there. Seen with 7 B parameters on one H200: 43 GiB.
"""

from typing import Any

import torch

ADAM_MOMENTS = 2 * 4  # bytes a parameter, float32


def reserve_adam_memory(optimizer: Any) -> torch.Tensor | None:
    """As many bytes as the states that Megatron's optimizer makes in its first update of this rank.

    On their device; torch gives the memory to the states when the tensor is freed. None where there
    are no states to come.
    """
    wanted, device = 0, None
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None or part.config.optimizer_cpu_offload:
            continue
        parameters = [each for group in part.optimizer.param_groups for each in group["params"]]
        for parameter in parameters:  # of a distributed optimizer: this rank's shards, none in some groups
            if not part.optimizer.state.get(parameter):
                wanted += bytes_of_states(part.config) * parameter.numel()
                device = parameter.device
    return torch.empty(wanted, dtype=torch.uint8, device=device) if wanted else None


def bytes_of_states(config: Any) -> int:
    """Bytes a parameter, by Megatron's OptimizerConfig.

    Without the precision-aware optimizer, and with it where Megatron keeps the float32 master
    weights itself, these exist from the start.
    """
    if not config.use_precision_aware_optimizer:
        return ADAM_MOMENTS
    moments = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
    if not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return moments
    master = torch.int16 if config.store_param_remainders else config.main_params_dtype
    return moments + master.itemsize
