"""A critic's value head, which Megatron-Bridge does not export.

The bridge exports only weights whose names are in the source model, and a tied model has no output
layer. In files, the head has the name of an output layer.
"""

from typing import Any

import torch
import torch.distributed as dist

VALUE_HEAD = "output_layer.weight"  # the end of its name in Megatron


def value_head(engine: Any) -> torch.Tensor:
    """The value head [1, hidden] of verl's ``engine`` on every rank. Collective."""
    from megatron.core import parallel_state
    from verl.utils.device import get_device_name

    weights = dict(engine.module[-1].named_parameters())
    own = next((weight.detach() for name, weight in weights.items() if name.endswith(VALUE_HEAD)), None)
    config = engine.tf_config
    if own is None:  # another pipeline stage has it
        head = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=get_device_name())
    else:
        head = own.clone()
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(head, parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
    return head
