"""The frozen weights of adapted models in FP8: model/fp8.py on Megatron's linear layers.

A layer's parameter holds one byte a value. It is whole while the layer computes its output, and
what autograd keeps of it is a note of whose it is: for the gradient of the layer's input it is made
again. So one matrix at a time is whole, of Transformer Engine's layers and of a CPU's alike, and
what is recomputed needs nothing more.

A row's scale is that of the whole row: ranks of tensor parallelism that each have a part of its
columns agree on it, so that every layout has the same weights.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from torch.autograd.graph import saved_tensors_hooks

from retool_mcore.model.fp8 import from_fp8, row_scales, to_fp8
from retool_mcore.platforms.lora import CUT_BY_INPUT, linears_of


class _Stored:
    """Mixed in before the class of a linear layer whose weight is in FP8."""

    weight: torch.nn.Parameter
    scales: torch.Tensor
    made: Callable[[], Any]  # a weak reference to the storage of the whole weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stored, whole = self.weight.data, self.whole()
        address = whole.data_ptr()
        self.weight.data = whole
        del whole  # it ends with this call

        def pack(saved: torch.Tensor) -> Any:
            if saved.untyped_storage().data_ptr() == address:
                return _Noted(self, saved)
            # A function that kept its own output through a hook would never be freed.
            return saved if saved.is_leaf else saved.detach()

        try:
            with saved_tensors_hooks(pack, _unpack):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.weight.data = stored

    def whole(self) -> torch.Tensor:
        """The weight in the model's number type; the same one for all who hold it at a time."""
        if (alive := self.made()) is not None:
            view: Any = torch.empty(0, dtype=self.scales.dtype, device=alive.device)
            return view.set_(alive, 0, self.weight.shape)
        made = from_fp8(self.weight.data, self.scales.to(self.weight.device))
        self.made = weakref.ref(made.untyped_storage())
        return made


class _Noted:
    """What autograd keeps in place of a layer's whole weight, or of a view of it."""

    def __init__(self, layer: _Stored, saved: torch.Tensor) -> None:
        self._layer = layer
        self._view = (saved.size(), saved.stride(), saved.storage_offset())

    def whole(self) -> torch.Tensor:
        return self._layer.whole().as_strided(*self._view)


def _unpack(kept: Any) -> torch.Tensor:
    return kept.whole() if isinstance(kept, _Noted) else kept


@torch.no_grad()
def store(chunk: Any) -> None:
    """Keep the frozen matrices of a loaded chunk's layers in FP8. Collective."""
    cut = parallel_state.get_tensor_model_parallel_world_size() > 1
    for layer in chunk.decoder.layers:
        for path, one in linears_of(layer):
            largest = one.weight.abs().amax(1)
            if cut and path in CUT_BY_INPUT:
                group = parallel_state.get_tensor_model_parallel_group()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            one.scales, one.made = row_scales(largest, one.weight.dtype), _nothing
            one.weight.data = to_fp8(one.weight.data, one.scales)
            one.__class__ = type(f"Stored{type(one).__name__}", (_Stored, type(one)), {})


def _nothing() -> None:
    """A weak reference to what is not there."""


def whole_parameters(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A chunk's parameters by name; those in FP8 whole, one at a time."""
    layers = {f"{name}.weight": module for name, module in chunk.named_modules() if isinstance(module, _Stored)}
    for name, parameter in chunk.named_parameters():
        layer = layers.get(name)
        if layer is None:
            yield name, parameter
            continue
        whole = layer.whole()
        copy_tensor_model_parallel_attributes(whole, parameter)
        yield name, whole
