"""What the patch of mbridge's export of experts is for, as a probe of without_patches.py."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

from retool_mcore.platforms.patches_mbridge import EXPERT_EXPORT_PATCH

EXPERTS = 6  # of one layer on two ranks


def gathers_of_a_layer(_: object) -> str:
    """What is exported, and by how many gathers. The other rank's experts are this one's."""
    import torch
    import torch.distributed as dist
    from mbridge.core import bridge as core
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    counted = []

    def names_of_stages(object_list: list[Any], obj: Any, group: Any) -> None:
        object_list[0] = obj

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        counted.append(parts)
        for part in parts:
            part.copy_(mine)

    def into_tensor(whole: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        counted.append(whole)
        whole.view(2, -1).copy_(mine.view(1, -1).expand(2, -1))

    weights = [
        (f"decoder.layers.0.mlp.experts.linear_fc2.weight{number}", torch.full((2, 3), float(number)))
        for number in range(EXPERTS // 2)
    ]
    named = [("decoder.layers.0.mlp.router.weight", torch.ones(EXPERTS, 2)), *weights]
    decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=1)])
    chunk: Any = SimpleNamespace(named_parameters=lambda: iter(named), state_dict=lambda: dict(named), decoder=decoder)
    bridge: Any = object.__new__(Qwen3MoEBridge)
    bridge.mpu = SimpleNamespace(pp_size=1, pp_rank=0, pp_group=None, ep_size=2, ep_group=None, etp_size=1, tp_size=1)
    bridge.config, bridge.make_vocab_size_divisible_by = SimpleNamespace(num_moe_experts=EXPERTS), None
    as_it_is: dict[str, Any] = {
        name: lambda value: value for name in ("broadcast_from_megatron_pp", "broadcast_str_from_megatron_pp")
    }
    ours: dict[str, Any] = {
        "all_gather": all_gather,
        "all_gather_into_tensor": into_tensor,
        "all_gather_object": names_of_stages,
    }
    with mock.patch.multiple(core, **as_it_is), mock.patch.multiple(dist, **ours):
        found = [f"{name.split('.', 3)[3]}={weight.sum():g}" for name, weight in bridge.export_weights([chunk])]
    return f"{' '.join(found)}; {len(counted)} gathers"


ENABLES = {EXPERT_EXPORT_PATCH.changes[0].target: gathers_of_a_layer}
