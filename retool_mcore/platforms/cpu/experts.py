"""Megatron-core's experts without Transformer Engine, with the weight names that mbridge needs."""

import re
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

LINEARS = ("linear_fc1", "linear_fc2")
_LOCAL_NAME = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class PlainTorchExperts(SequentialMLP):
    """Runs the experts one by one; names weights as Transformer Engine's grouped experts do.

    For example linear_fc1.weight7: mbridge reads the expert's number from the name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = tuple(self.local_experts)
        del self.local_experts  # a ModuleList would register each weight under a second name
        object.__setattr__(self, "local_experts", experts)
        for name in LINEARS:
            named = torch.nn.Module()
            for index, expert in enumerate(experts):
                named.register_parameter(f"weight{index}", getattr(expert, name).weight)
            self.add_module(name, named)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        shards: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        return {_LOCAL_NAME.sub(r"\2.weight\1", name): shard for name, shard in shards.items()}
