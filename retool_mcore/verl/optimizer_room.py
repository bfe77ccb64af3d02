"""Reserves the memory of Adam's states before the rollout engine measures the free memory.

Adam allocates its moments in the first update. SGLang starts long before that and sizes itself by
the memory that is free. Without the reservation, the moments would take memory that the engine
needs when it wakes up, and the run would fail there. With 7 B parameters on one H200 the states
take 43 GiB.
"""

from typing import Any

import torch

ADAM_MOMENTS = 2 * 4  # bytes per parameter, two float32 moments


def reserve_adam_memory(optimizer: Any) -> torch.Tensor | None:
    """Allocate as much memory as Megatron's optimizer will allocate on this rank at its first step.

    Free the tensor before that step, so that torch's allocator reuses its memory for the states.

    Returns:
        uint8 [bytes] on the device of the states; None if the optimizer will allocate none there.
    """
    wanted, device = 0, None
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None or part.config.optimizer_cpu_offload:
            continue
        parameters = [each for group in part.optimizer.param_groups for each in group["params"]]
        for parameter in parameters:  # the distributed optimizer has only this rank's shards
            if not part.optimizer.state.get(parameter):
                wanted += bytes_of_states(part.config) * parameter.numel()
                device = parameter.device
    return torch.empty(wanted, dtype=torch.uint8, device=device) if wanted else None


def bytes_of_states(config: Any) -> int:
    """Bytes per parameter of the states that the first step allocates, by Megatron's config.

    Includes master weights only if the optimizer allocates them. Megatron allocates them itself, at
    the start, without the precision-aware optimizer or with
    use_precision_aware_optimizer_no_fp8_or_ds_fp8 off.
    """
    if not config.use_precision_aware_optimizer:
        return ADAM_MOMENTS
    moments = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
    if not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return moments
    master = torch.int16 if config.store_param_remainders else config.main_params_dtype
    return moments + master.itemsize
