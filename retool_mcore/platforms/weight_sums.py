"""Checksums of weights, with which the trainer compares its weights with an engine's.

The checksum adds the elements' bit patterns as integers. Addition does not depend on order, so the
checksum of a matrix is the sum of its shards' checksums.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

ACTION = "retool_sums:"  # followed by the prefix of the weights' names
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = dict[str, tuple[str, int, int]]  # name -> dtype, elements, sum of the elements' bits modulo 2**64


def checksum(weight: torch.Tensor) -> torch.Tensor:
    """The checksum of ``weight``, an int64 scalar on its device."""
    return weight.detach().contiguous().view(BITS[weight.element_size()]).sum(dtype=torch.int64)


def sums_of(weights: Iterable[tuple[str, str, int, torch.Tensor]]) -> Sums:
    """Build ``Sums`` from (name, dtype, elements, ``checksum``); synchronizes the device once."""
    entries = list(weights)
    sums = torch.stack([bits for *_, bits in entries]).tolist() if entries else []
    return {name: (dtype, size, bits) for (name, dtype, size, _), bits in zip(entries, sums, strict=True)}


def with_sums(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @wraps(original)
    def handle(self: Any, action: str) -> Any:
        if not action.startswith(ACTION):
            return original(self, action)
        prefix = action.removeprefix(ACTION)
        weights = self._model_runner.model.named_parameters()
        sums = sums_of(
            (name, str(weight.dtype), weight.numel(), checksum(weight))
            for name, weight in weights
            if name.startswith(prefix)
        )
        return {"per_gpu_checksum": "", "sums": sums}  # SGLang requires the first key from every rank

    return handle
