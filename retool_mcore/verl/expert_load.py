"""Measures how evenly the routers distribute an update's tokens over the experts of each layer."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name

from retool_mcore.run.metrics import EXPERTS

MAX_OVER_MEAN = EXPERTS + "load_max_over_mean"


class ExpertLoad:
    """Counts how often each router of a Megatron model chooses each expert in training passes.

    ``chunks``: this rank's model chunks; ``config``: the model's TransformerConfig.
    """

    def __init__(self, chunks: Sequence[Any], config: Any) -> None:
        self._counts_LE = torch.zeros(
            config.num_layers, config.num_moe_experts, dtype=torch.int64, device=get_device_name()
        )
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith(".mlp.router"):  # the module's name in mbridge's weight mapping
                    module.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Skips the first pass of a recomputed layer, which runs without gradients.
        if torch.is_grad_enabled():
            self._counts_LE[router.layer_number - 1] += output[1].sum(dim=0)

    def take(self) -> dict[str, float]:
        """``load_metrics`` of the passes since the last call. Collective.

        Exactly one rank counts each token of a layer: data, context and sequence parallelism divide
        the tokens, pipeline parallelism divides the layers, and each router chooses among all
        experts.
        """
        dist.all_reduce(self._counts_LE)
        metrics = load_metrics(self._counts_LE.cpu())
        self._counts_LE.zero_()
        return metrics


def load_metrics(counts_LE: torch.Tensor) -> dict[str, float]:
    """The metrics ``experts/*`` of run/metric_table.py.

    ``counts_LE``: int64 [L, E], how often each expert was chosen; 0 in layers without experts.
    """
    layers = counts_LE.sum(dim=1).nonzero().flatten().tolist()
    if not layers:
        return {}
    chosen = counts_LE[layers].double()
    ratios = (chosen.amax(dim=1) / chosen.mean(dim=1)).tolist()
    return {
        MAX_OVER_MEAN: sum(ratios) / len(ratios),
        EXPERTS + "unused": (chosen == 0).double().mean().item(),
        **{f"{MAX_OVER_MEAN}/layer_{layer}": ratio for layer, ratio in zip(layers, ratios, strict=True)},
    }
