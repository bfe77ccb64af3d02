"""Compares the engines' weights with those that the actor sent, after each weight sync.

The first sync of a process compares every weight. Later syncs compare one layer each, round-robin.
The check compares checksums of whole layers, because engines fuse and shard matrices. It skips
weights that the engine stores differently: quantized matrices and a padded vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.platforms.weight_sums import Sums, checksum, sums_of

_LAYER = re.compile(r".*\blayers\.\d+\.")
_IN_FLOAT32 = ".A_log"  # the decay of a DeltaNet layer, which SGLang stores in float32


class SentWeights:
    """Sums the weights that verl's ``engine`` exports during a weight sync, on rank 0."""

    def __init__(self, engine: Any) -> None:
        self._export = engine.get_per_tensor_param
        self._layers: list[str] = []  # known after the first sync
        self._syncs = 0
        self._sent: list[tuple[str, str, int, torch.Tensor]] = []
        engine.get_per_tensor_param = self._export_and_record

    def _export_and_record(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        weights, adapters = self._export(*args, **kwargs)
        return self._record(weights) if dist.get_rank() == 0 else weights, adapters

    def _record(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        self._sent = []
        prefix = self._layers[self._syncs % len(self._layers)] if self._layers else ""
        for name, weight in weights:
            if name.startswith(prefix):
                stored = weight.float() if name.endswith(_IN_FLOAT32) else weight
                self._sent.append((name, str(stored.dtype), stored.numel(), checksum(stored)))
            yield name, weight
        self._layers = self._layers or list(dict.fromkeys(layer_of(name) for name, *_ in self._sent))
        self._syncs += 1

    def sums(self) -> tuple[str, Sums]:
        """The layer that the last sync compared, "" for all layers, and its sums."""
        layers = {layer_of(name) for name, *_ in self._sent}
        return layers.pop() if len(layers) == 1 else "", sums_of(self._sent)


def layer_of(name: str) -> str:
    """The name's prefix up to the layer number, or the whole name of a weight outside layers."""
    match = _LAYER.match(name)
    return match[0] if match else name


def different_layers(actor: Sums, engine: Sequence[Sums]) -> list[str]:
    """The layers in which an engine's weights differ from the actor's.

    ``engine``: the sums of each rank. A weight that is replicated on every rank counts once.
    Skips a dtype of a layer if the two sides have different numbers of elements with that dtype,
    because the engine then stores these weights differently.
    """
    theirs: list[Sums] = [
        {name: values for name, values in sums.items() if not (rank and _is_replica(name, values, actor))}
        for rank, sums in enumerate(engine)
    ]
    ours, engines = _by_layer([actor]), _by_layer(theirs)
    return [layer for layer, sizes in ours.items() if _differs(sizes, engines.get(layer, {}))]


def _is_replica(name: str, sums: tuple[str, int, int], actor: Sums) -> bool:
    layer = layer_of(name)
    names = (name, f"{layer}self_attn.{name.removeprefix(layer)}")  # SGLang's Qwen3.5 has no self_attn in its names
    return any(each in actor and actor[each][:2] == sums[:2] for each in names)


def _by_layer(ranks: Sequence[Sums]) -> dict[str, dict[str, tuple[int, int]]]:
    """layer -> dtype -> (number of elements, checksum), summed over ``ranks``."""
    layers: dict[str, dict[str, tuple[int, int]]] = {}
    for sums in ranks:
        for name, (dtype, size, bits) in sums.items():
            layer = layers.setdefault(layer_of(name), {})
            before = layer.get(dtype, (0, 0))
            layer[dtype] = (before[0] + size, (before[1] + bits) % 2**64)
    return layers


def _differs(ours: Mapping[str, tuple[int, int]], theirs: Mapping[str, tuple[int, int]]) -> bool:
    alike = {dtype: sums for dtype, sums in ours.items() if dtype in theirs and theirs[dtype][0] == sums[0]}
    return any(theirs[dtype] != sums for dtype, sums in alike.items())
