"""Adapters as whole matrices under their Hugging Face names, and the bridge's weights with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from retool_mcore.model.adapter import merged
from retool_mcore.platforms.fp8_base import store, whole_parameters
from retool_mcore.platforms.lora import HELD, MODULE, Adapters, Factor, adapt, factors_of

Pair = tuple[torch.Tensor, torch.Tensor]  # A [r, in] and B [out, r], whole


@torch.no_grad()
def gather(chunks: Sequence[Any]) -> dict[str, Pair]:
    """Every adapter of the model, whole, on every rank; by the name of its matrix. Collective."""
    mine = factors_of(chunks)
    found = dict(zip((factor.name for factor in mine), _over_tensor_parallel(mine), strict=True))
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    shapes = [(name, *(each.shape for each in pair)) for name, pair in found.items()]
    of_all: list[Any] = [None] * group.size()
    dist.all_gather_object(of_all, shapes, group=group)
    like, whole = mine[0].A, dict[str, Pair]()
    for stage, told in enumerate(of_all):
        count = sum(a.numel() + b.numel() for _, a, b in told)
        flat = torch.empty(count, device=like.device, dtype=like.dtype)
        if stage == group.rank():
            flat = torch.cat([each.reshape(-1) for pair in found.values() for each in pair])
        dist.broadcast(flat, dist.get_global_rank(group, stage), group=group)
        pieces = iter(flat.split([shape.numel() for _, *pair in told for shape in pair]))
        for name, a, b in told:
            whole[name] = next(pieces).view(a), next(pieces).view(b)
    return whole


def _over_tensor_parallel(factors: Sequence[Factor]) -> Iterator[Pair]:
    group: Any = parallel_state.get_tensor_model_parallel_group()
    cut = [getattr(factor, factor.cut).detach() for factor in factors]
    parts = [[each] for each in cut]
    if group.size() > 1:
        flat = torch.cat([each.reshape(-1) for each in cut])
        of_all = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(of_all, flat, group=group)
        split = [each.split([one.numel() for one in cut]) for each in of_all]
        parts = [[rank[number].view_as(one) for rank in split] for number, one in enumerate(cut)]
    for factor, pieces in zip(factors, parts, strict=True):
        whole = torch.cat(pieces, 1 if factor.cut == "A" else 0)
        yield (whole, factor.B.detach()) if factor.cut == "A" else (factor.A.detach(), whole)


@torch.no_grad()
def load(chunks: Sequence[Any], weights: Mapping[str, Pair]) -> None:
    """Copy this rank's part of whole adapters into the model."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for factor in factors_of(chunks):
        for own, whole, cut in zip((factor.A, factor.B), weights[factor.name], ("A", "B"), strict=True):
            dim = 1 if cut == "A" else 0
            mine = whole.narrow(dim, rank * own.shape[dim], own.shape[dim]) if factor.cut == cut else whole
            assert mine.shape == own.shape, f"{factor.name} {cut}: {mine.shape} for {own.shape}"
            own.copy_(mine)


class _WithoutAdapters:
    """A model's chunk as the bridge knows it. ``only``: of its weights those of adapted layers."""

    def __init__(self, chunk: Any, *, only: bool) -> None:
        self._chunk, self._only = chunk, only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapted = {name.partition(f".{MODULE}.")[0] for name, _ in self._chunk.named_parameters() if _is_adapter(name)}
        for name, parameter in whole_parameters(self._chunk):
            layer, _, last = name.rpartition(".")
            if not _is_adapter(name) and (not self._only or (last == "weight" and layer in adapted)):
                yield name, parameter


def _is_adapter(name: str) -> bool:
    return any(f".{path}.{MODULE}." in name for path in HELD)


class AdaptedBridge:
    """mbridge of a model that gets adapters, which it neither reads nor writes.

    It builds chunks with adapters, and exports W + s B A under the names and in the shapes of W.
    ``only_changed``: the export that is asked for next leaves out what training does not change.
    """

    only_changed = False

    def __init__(self, bridge: Any, adapters: Adapters) -> None:
        self._adapters = adapters
        self._export: Callable[..., Iterator[tuple[str, torch.Tensor]]] = bridge.export_weights
        names, build = bridge._weight_name_mapping_mcore_local_to_global, bridge.get_model
        bridge.get_model = partial(self._get_model, build)
        if adapters.base_in_fp8:
            bridge.load_weights = partial(self._load_and_store, bridge.load_weights)
        bridge._weight_name_mapping_mcore_local_to_global = _known(names)
        bridge.export_weights = lambda models: self._merged(_unwrapped(models), self.only_changed)

    def _get_model(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        callbacks = [*kwargs.pop("post_model_creation_callbacks", []), self._adapt]
        return build(*args, post_model_creation_callbacks=callbacks, **kwargs)

    def _load_and_store(self, load_weights: Callable[..., None], models: Sequence[Any], *args: Any) -> None:
        from verl.utils.device import get_torch_device

        load_weights(models, *args)
        for chunk in _unwrapped(models):
            store(chunk)
        device = get_torch_device()
        device.empty_cache()
        device.reset_peak_memory_stats()  # or the peak of a run would be that of its start, with all weights whole

    def _adapt(self, model: Any, **_: Any) -> None:
        adapt(model, self._adapters)

    def _merged(self, chunks: Sequence[Any], only_changed: bool) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = gather(chunks)
        for name, weight in self._export([_WithoutAdapters(chunk, only=only_changed) for chunk in chunks]):
            pair = pairs.get(name.removesuffix(".weight"))
            if pair is not None:
                yield name, merged(weight.detach(), *pair, self._adapters.scale)
            elif not only_changed:
                yield name, weight


def _known(original: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    @wraps(original)
    def names(model: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        return {local: name for local, name in original(model, *args, **kwargs).items() if not _is_adapter(local)}

    return names


def _unwrapped(models: Sequence[Any]) -> list[Any]:
    from mbridge.core.util import unwrap_model

    return [unwrap_model(model) for model in models]
