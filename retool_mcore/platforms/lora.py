"""LoRA: adapters on Megatron's linear layers, a frozen base in FP8, and the bridge's export.

A layer keeps its weight and the weight's name, and gets a submodule `adapter` with A [r, in] and
B [out, r] for each Hugging Face matrix that is fused into it: linear_qkv gets those of q_proj,
k_proj and v_proj. Adapters are therefore equivalent to peft's.

Shapes: S tokens of this rank's part of a sequence, B batch, r rank. In column-parallel layers (TP
shards the output) B is sharded and A is replicated; in row-parallel layers (TP shards the input) A
is sharded and B is replicated.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout, linear

from retool_mcore.errors import PlatformError
from retool_mcore.model.adapter import from_fp8, merged, row_scales, to_fp8

FUSED = {  # path of a linear in Megatron's layer -> the Hugging Face matrices fused into it, in order
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
ROW_PARALLEL = ("self_attention.linear_proj", "mlp.linear_fc2")
Pair = tuple[torch.Tensor, torch.Tensor]  # A [r, in] and B [out, r], unsharded
MODULE = "adapter"  # name of the submodule and part of its parameters' names; the bridge skips them


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of [lora]."""

    rank: int
    alpha: float
    dropout: float
    matrices: tuple[str, ...]  # "q_proj" ...
    seed: int
    base_in_fp8: bool = False  # whether the layers' frozen weights are stored in FP8

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class MatrixAdapter(torch.nn.Module):
    """This rank's shards of one matrix's A [r, in] and B [out, r].

    A is initialized as in peft, uniform within +-1 / sqrt(in). Its generator is seeded by the run's
    seed and the matrix's name, so that A does not depend on the parallel layout. B starts at 0, so
    that the model starts as its base.
    """

    def __init__(
        self, name: str, settings: LoraSettings, width: int, out: int, *, row_parallel: bool, like: torch.Tensor
    ):
        super().__init__()
        self.name = name  # in the Hugging Face model
        self.sharded = "A" if row_parallel else "B"
        ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), 0
        if row_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
        full_width = width * (ranks if row_parallel else 1)
        digest = hashlib.sha256(f"{settings.seed} {name}".encode()).digest()
        full = torch.empty(settings.rank, full_width)
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full.uniform_(-(full_width**-0.5), full_width**-0.5, generator=generator)
        shard = full[:, rank * width : (rank + 1) * width]
        self.A = torch.nn.Parameter(shard.to(like.device, like.dtype).contiguous())
        self.B = torch.nn.Parameter(torch.zeros(out, settings.rank, device=like.device, dtype=like.dtype))
        set_tensor_model_parallel_attributes(self.A if row_parallel else self.B, True, 1 if row_parallel else 0, 1)


class Adapter(torch.nn.Module):
    """The adapters of one layer; their output is added to the layer's output.

    ``rows``: number of rows of each fused matrix on this rank. ``groups``: number of query
    groups, each with its rows of queries, keys and values; 1 in other layers.
    """

    def __init__(
        self,
        fused: Sequence[str],
        layer: Any,
        settings: LoraSettings,
        rows: Sequence[int],
        *,
        row_parallel: bool,
        groups: int,
    ) -> None:
        super().__init__()
        config, weight = layer.config, layer.weight
        self.row_parallel, self.groups, self.rows = row_parallel, groups, tuple(rows)
        self.scale, self.dropout, self.on = settings.scale, settings.dropout, True
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sequence_parallel = bool(config.sequence_parallel) and self.ranks > 1
        self.factors = torch.nn.ModuleDict()
        for name, count in zip(fused, rows, strict=True):
            short = name.rpartition(".")[2]
            if short in settings.matrices:
                where = f"model.layers.{layer.lora_layer}.{name}"
                self.factors[short] = MatrixAdapter(
                    where, settings, weight.shape[1], count, row_parallel=row_parallel, like=weight
                )
        self._order = [name.rpartition(".")[2] for name in fused]
        for factor in self.factors.values():
            # The replicated one of A and B sees only this rank's tokens, so mark it for Megatron to
            # sum its gradient over TP ranks.
            replicated = factor.B if row_parallel else factor.A
            replicated.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [S, B, in], the layer's GEMM input, to [S', B, out], to be added to its output."""
        if self.dropout and self.training:
            x = self._drop(x)
        parts: list[Any] = list(self.factors.values())
        h = linear(x, torch.cat([part.A for part in parts])) * self.scale
        if self.row_parallel:
            if self.sequence_parallel:
                h = reduce_scatter_to_sequence_parallel_region(h)
            elif self.ranks > 1:
                h = reduce_from_tensor_model_parallel_region(h)
        elif self.sequence_parallel:
            h = gather_from_sequence_parallel_region(h)
        elif self.ranks > 1:
            h = copy_to_tensor_model_parallel_region(h)
        products: dict[str, torch.Tensor] = {}
        for name, part, piece in zip(self.factors, parts, h.chunk(len(parts), -1), strict=True):
            products[name] = linear(piece, part.B)
        return self._join(products, h)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout; TP ranks with the same x use the same mask, those with shards do not."""
        if not self.row_parallel and not self.sequence_parallel:
            return dropout(x, self.dropout)
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        with tracker.fork():
            return dropout(x, self.dropout)

    def _join(self, products: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Arrange the products in the row order of the layer's output; 0 for other matrices."""
        parts = [
            products[name] if name in products else like.new_zeros(*like.shape[:-1], count)
            for name, count in zip(self._order, self.rows, strict=True)
        ]
        if self.groups == 1:
            return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], -1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        axis = 1 if self.row_parallel else 0
        axes = {f"factors.{name}.{factor.sharded}": axis for name, factor in self.factors.items()}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets
        )


class _Adapted:
    """Mixin for a linear layer with an adapter; list it before the layer's class."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if isinstance(output, tuple):  # Transformer Engine's fused norm and linear also returns the norm's output
            output, x = output
        adapter = getattr(self, MODULE)
        return (output + adapter(x) if adapter.on else output), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        shards = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        layers = {name: value for name, value in shards.items() if not name.startswith(f"{prefix}{MODULE}.")}
        return layers | getattr(self, MODULE).sharded_state_dict(f"{prefix}{MODULE}.", sharded_offsets, metadata)


def adapt(chunk: Any, settings: LoraSettings) -> None:
    """Freeze a model chunk and add adapters to its linears.

    Call it before DDP wraps the chunk and before the optimizer is built: both use the parameters
    that are trainable then.
    """
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        for path, fused in FUSED.items():
            if any(name.rpartition(".")[2] in settings.matrices for name in fused):
                _adapt_linear(layer, path, fused, settings)
    if getattr(chunk, "pre_process", False):
        # Recomputed layers get gradients only if their input requires one.
        chunk.embedding.register_forward_hook(_start_gradients)


def _start_gradients(module: Any, args: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _adapt_linear(layer: Any, path: str, fused: Sequence[str], settings: LoraSettings) -> None:
    linear_layer, name = dict(linears_of(layer))[path], path.rpartition(".")[2]
    config, ranks = layer.config, parallel_state.get_tensor_model_parallel_world_size()
    groups = 1
    if name == "linear_qkv":
        groups = config.num_query_groups // ranks
        rows = [config.num_attention_heads * config.kv_channels // ranks, *[groups * config.kv_channels] * 2]
    else:
        rows = [linear_layer.weight.shape[0] // len(fused)] * len(fused)
    linear_layer.lora_layer = layer.layer_number - 1
    adapter = Adapter(fused, linear_layer, settings, rows, row_parallel=path in ROW_PARALLEL, groups=groups)
    linear_layer.add_module(MODULE, adapter)
    kind = type(linear_layer)  # the bridge knows by its name how the weight is sharded
    linear_layer.__class__ = type(kind.__name__, (_Adapted, kind), {})
    if hasattr(linear_layer, "return_layernorm_output"):
        linear_layer.return_layernorm_output = True


def linears_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the module of each linear in one of Megatron's layers.

    Raises PlatformError for layers with experts or a Gated DeltaNet.
    """
    for path in FUSED:
        owner, _, name = path.partition(".")
        linear_layer = getattr(getattr(layer, owner), name, None)
        if linear_layer is None:
            raise PlatformError(
                f"layer {layer.layer_number} of the model has no {path}, so it cannot have adapters. Use a dense model "
                "with attention in every layer, or train all weights with lora.rank = 0."
            )
        yield path, linear_layer


def _adapters_of(chunks: Iterable[Any]) -> Iterator[Adapter]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def factors_of(chunks: Iterable[Any]) -> list[MatrixAdapter]:
    """This rank's factors, in model order."""
    return [factor for adapter in _adapters_of(chunks) for factor in adapter.factors.values()]  # type: ignore[misc]


@contextmanager
def switched_off(chunks: Iterable[Any]) -> Iterator[None]:
    """Disable the adapters within this context: the model computes the base model's outputs."""
    all_adapters = list(_adapters_of(chunks))
    for adapter in all_adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in all_adapters:
            adapter.on = True


class _Fp8Linear:
    """Mixin for the class of a linear layer whose weight is stored in FP8 (model/adapter.py).

    The parameter has one byte per element. It is dequantized while the layer computes its output.
    Autograd saves a reference to the layer instead of the weight, and dequantizes it again for the
    gradient of the layer's input. So only one dequantized matrix exists at a time.
    """

    weight: torch.nn.Parameter
    scales: torch.Tensor
    live_storage: Callable[[], Any]  # weak reference to the storage of the dequantized weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stored, dequantized = self.weight.data, self.dequantized()
        address = dequantized.data_ptr()
        self.weight.data = dequantized
        del dequantized  # so that the tensor is freed after this call

        def pack(saved: torch.Tensor) -> Any:
            if saved.untyped_storage().data_ptr() == address:
                return _WeightReference(self, saved)
            # Detach, or the autograd node and its output would keep each other alive.
            return saved if saved.is_leaf else saved.detach()

        try:
            with saved_tensors_hooks(pack, _unpack):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.weight.data = stored

    def dequantized(self) -> torch.Tensor:
        """The weight in the model's dtype; shares the storage of a live copy."""
        if (alive := self.live_storage()) is not None:
            view: Any = torch.empty(0, dtype=self.scales.dtype, device=alive.device)
            return view.set_(alive, 0, self.weight.shape)
        weight = from_fp8(self.weight.data, self.scales.to(self.weight.device))
        self.live_storage = weakref.ref(weight.untyped_storage())
        return weight


class _WeightReference:
    """What autograd saves instead of a layer's dequantized weight or a view of it."""

    def __init__(self, layer: _Fp8Linear, saved: torch.Tensor) -> None:
        self._layer = layer
        self._view = (saved.size(), saved.stride(), saved.storage_offset())

    def dequantized(self) -> torch.Tensor:
        return self._layer.dequantized().as_strided(*self._view)


def _unpack(saved: Any) -> torch.Tensor:
    return saved.dequantized() if isinstance(saved, _WeightReference) else saved


@torch.no_grad()
def quantize_base(chunk: Any) -> None:
    """Convert the frozen matrices of a loaded chunk's layers to FP8. Collective.

    Each row has one scale. TP ranks that shard the columns of a row agree on its scale, so that the
    weights are the same in every layout.
    """
    sharded = parallel_state.get_tensor_model_parallel_world_size() > 1
    for layer in chunk.decoder.layers:
        for path, linear_layer in linears_of(layer):
            largest = linear_layer.weight.abs().amax(1)
            if sharded and path in ROW_PARALLEL:
                group = parallel_state.get_tensor_model_parallel_group()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            linear_layer.scales = row_scales(largest, linear_layer.weight.dtype)
            linear_layer.live_storage = lambda: None  # no dequantized copy exists yet
            linear_layer.weight.data = to_fp8(linear_layer.weight.data, linear_layer.scales)
            kind = type(linear_layer)
            linear_layer.__class__ = type(kind.__name__, (_Fp8Linear, kind), {})


@torch.no_grad()
def gather(chunks: Sequence[Any]) -> dict[str, Pair]:
    """All adapters of the model, unsharded, on every rank: matrix name -> (A, B). Collective."""
    own_pairs = {factor.name: _unsharded(factor) for factor in factors_of(chunks)}
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        return own_pairs
    shapes_of_stages: list[Any] = [None] * stages.size()
    shapes = {name: [tuple(matrix.shape) for matrix in pair] for name, pair in own_pairs.items()}
    dist.all_gather_object(shapes_of_stages, shapes, group=stages)
    like, gathered = next(iter(own_pairs.values()))[0], dict[str, Pair]()
    for stage, shapes in enumerate(shapes_of_stages):
        for name, (a_shape, b_shape) in shapes.items():
            pair = own_pairs.get(name) or (like.new_empty(a_shape), like.new_empty(b_shape))
            for matrix in pair:
                dist.broadcast(matrix, dist.get_global_rank(stages, stage), group=stages)
            gathered[name] = pair
    return gathered


def _unsharded(factor: MatrixAdapter) -> Pair:
    """A factor's A [r, in] and B [out, r] on every TP rank. Collective."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    shard = getattr(factor, factor.sharded).detach().contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    if factor.sharded == "A":
        return torch.cat(shards, 1), factor.B.detach()
    return factor.A.detach(), torch.cat(shards)


@torch.no_grad()
def load(chunks: Sequence[Any], weights: Mapping[str, Pair]) -> None:
    """Copy this rank's shards of unsharded adapters into the model."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for factor in factors_of(chunks):
        for letter, full in zip("AB", weights[factor.name], strict=True):
            shard, axis = getattr(factor, letter), 1 if letter == "A" else 0
            if factor.sharded == letter:
                full = full.narrow(axis, rank * shard.shape[axis], shard.shape[axis])  # noqa: PLW2901  this rank's part
            assert full.shape == shard.shape, f"{factor.name} {letter}: {full.shape} for {shard.shape}"
            shard.copy_(full)


class AdaptedBridge:
    """Changes an engine's bridge: it loads into chunks with adapters and exports merged weights.

    The export has W + s B A under the names and in the shapes of W. The bridge itself ignores
    parameters of a module that is called ``adapter``.
    """

    def __init__(self, bridge: Any, provider: Any, settings: LoraSettings) -> None:
        self._settings, self._bridge = settings, bridge
        self._load, self._export = bridge.load_hf_weights, bridge.export_hf_weights
        provider.register_pre_wrap_hook(self._adapt)
        bridge.load_hf_weights, bridge.export_hf_weights = self._load_and_quantize, self._merged

    def _adapt(self, chunks: Sequence[Any]) -> Sequence[Any]:
        for chunk in chunks:
            adapt(chunk, self._settings)
        return chunks

    def _load_and_quantize(self, models: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        from verl.utils.device import get_torch_device

        self._load(models, *args, **kwargs)
        if not self._settings.base_in_fp8:
            return
        for chunk in unwrap_model(models):
            quantize_base(chunk)
        device = get_torch_device()
        device.empty_cache()
        device.reset_peak_memory_stats()  # excludes the load, when no weight is in FP8 yet

    def _merged(
        self, models: Sequence[Any], conversion_tasks: Sequence[Any] | None = None, **_: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = gather(models)
        tasks = map(_dequantized, conversion_tasks or self._bridge.get_conversion_tasks(models))
        weights = self._export(models, conversion_tasks=tasks, merge_adapter_weights=False, show_progress=False)
        for name, weight in weights:
            pair = pairs.get(name.removesuffix(".weight"))
            yield name, weight if pair is None else merged(weight.detach(), *pair, self._settings.scale)


def _dequantized(task: Any) -> Any:
    """One of the bridge's tasks, with its weight in the model's dtype."""
    layer = task.megatron_module
    if not isinstance(layer, _Fp8Linear) or task.param_weight is not layer.weight:
        return task
    weight = layer.dequantized()
    copy_tensor_model_parallel_attributes(weight, layer.weight)
    return replace(task, param_weight=weight)
