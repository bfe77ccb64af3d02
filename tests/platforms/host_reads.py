"""Counts reads of tensors, each of which would make the host wait for a device."""

from __future__ import annotations

from collections import Counter
from unittest import mock


def known_tokens():
    """Two sequences whose lengths the host knows."""
    import torch

    from retool_mcore.platforms.packing import jagged

    return jagged(torch.arange(5), torch.tensor([0, 3, 5]), (3, 2))


def reads(call) -> str:
    """How often ``call`` reads a tensor's numbers, for which the host would wait for a device."""
    import torch
    from megatron.core import parallel_state

    names = [f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "context") for what in ("world_size", "rank")]
    ones = {name: lambda name=name: int(name.endswith("size")) for name in names}
    original, count = torch.Tensor.tolist, Counter[str]()

    def counted(tensor):
        count["read"] += 1
        return original(tensor)

    with mock.patch.multiple(parallel_state, **ones), mock.patch.object(torch.Tensor, "tolist", counted):
        call()
    return f"{count['read']} reads"
