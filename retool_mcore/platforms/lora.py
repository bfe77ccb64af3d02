"""Low-rank adapters on Megatron's linear layers: Transformer Engine's and the plain ones of a CPU.

A layer keeps its weight and the weight's name, and gets a module `lora` below it with A [r, in] and
B [out, r] for each Hugging Face matrix that it holds: linear_qkv has those of q_proj, k_proj and
v_proj. So an adapter means here what it means to peft.

Shapes: S tokens of this rank's part of a sequence, B batch, r rank. Of a layer that tensor
parallelism cuts by its output, B is cut and A is whole on every rank; of one that it cuts by its
input, the other way round.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import dropout, linear

HELD = {  # a linear of Megatron's layer -> the Hugging Face matrices that it holds, in their order
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
CUT_BY_INPUT = ("self_attention.linear_proj", "mlp.linear_fc2")
MODULE = "lora"  # an adapter's name below its layer, and so a part of its parameters' names


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What is adapted, and how; of [lora]."""

    rank: int
    alpha: float
    dropout: float
    matrices: tuple[str, ...]  # "q_proj" ...
    seed: int
    base_in_fp8: bool = False  # the frozen weights of the layers: fp8_base.py

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Factor(torch.nn.Module):
    """One matrix's A [r, in] and B [out, r], this rank's part of them.

    A is drawn as by peft, uniform within 1 / sqrt(in), from the seed and the matrix's name, so that
    it is the same however the model is cut; B is 0, so that the model starts as its base.
    """

    def __init__(self, name: str, adapters: Adapters, width: int, out: int, *, by_input: bool, like: torch.Tensor):
        super().__init__()
        self.name = name  # in the Hugging Face model
        self.cut = "A" if by_input else "B"
        ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), 0
        if by_input:
            rank = parallel_state.get_tensor_model_parallel_rank()
        whole = width * (ranks if by_input else 1)
        digest = hashlib.sha256(f"{adapters.seed} {name}".encode()).digest()
        drawn = torch.empty(adapters.rank, whole)
        drawn.uniform_(-(whole**-0.5), whole**-0.5, generator=torch.Generator().manual_seed(_seed_of(digest)))
        mine = drawn[:, rank * width : (rank + 1) * width]
        self.A = torch.nn.Parameter(mine.to(like.device, like.dtype).contiguous())
        self.B = torch.nn.Parameter(torch.zeros(out, adapters.rank, device=like.device, dtype=like.dtype))
        set_tensor_model_parallel_attributes(self.A if by_input else self.B, True, 1 if by_input else 0, 1)


def _seed_of(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "big")


class Adapter(torch.nn.Module):
    """What one layer's output gets beside its own product.

    ``widths``: of each matrix in the layer its rows on this rank. ``groups``: the matrices' rows
    alternate in so many parts, as queries, keys and values do by their group.
    """

    def __init__(
        self, held: Sequence[str], layer: Any, adapters: Adapters, widths: Sequence[int], *, by_input: bool, groups: int
    ) -> None:
        super().__init__()
        config, weight = layer.config, layer.weight
        self.by_input, self.groups, self.widths = by_input, groups, tuple(widths)
        self.scale, self.dropout, self.on = adapters.scale, adapters.dropout, True
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sequence_parallel = bool(config.sequence_parallel) and self.ranks > 1
        self.factors = torch.nn.ModuleDict()
        for name, rows in zip(held, widths, strict=True):
            short = name.rpartition(".")[2]
            if short in adapters.matrices:
                where = f"model.layers.{layer.lora_layer}.{name}"
                self.factors[short] = Factor(
                    where, adapters, weight.shape[1], rows, by_input=by_input, like=weight
                )  # fmt: skip
        self._order = [name.rpartition(".")[2] for name in held]
        for factor in self.factors.values():
            # What is whole on every rank sees this rank's tokens only; Megatron sums its gradient.
            whole = factor.B if by_input else factor.A
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, B, in], the input of the layer's own product -> [S', B, out], beside its output."""
        if self.dropout and self.training:
            x = self._drop(x)
        parts: list[Any] = list(self.factors.values())
        h = linear(x, torch.cat([part.A for part in parts])) * self.scale
        if self.by_input:
            if self.sequence_parallel:
                h = reduce_scatter_to_sequence_parallel_region(h)
            elif self.ranks > 1:
                h = reduce_from_tensor_model_parallel_region(h)
        elif self.sequence_parallel:
            h = gather_from_sequence_parallel_region(h)
        elif self.ranks > 1:
            h = copy_to_tensor_model_parallel_region(h)
        products = dict(
            zip(self.factors, (linear(each, part.B) for each, part in zip(h.chunk(len(parts), -1), parts, strict=True)),
                strict=True)
        )  # fmt: skip
        return self._join(products, h)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks that hold the same values leave out the same ones."""
        if not self.by_input and not self.sequence_parallel:
            return dropout(x, self.dropout)
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        with tracker.fork():
            return dropout(x, self.dropout)

    def _join(self, products: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The matrices' products in the order in which the layer's own output has their rows."""
        whole = [
            products[name] if name in products else like.new_zeros(*like.shape[:-1], rows)
            for name, rows in zip(self._order, self.widths, strict=True)
        ]
        if self.groups == 1:
            return torch.cat(whole, -1) if len(whole) > 1 else whole[0]
        return torch.cat([each.unflatten(-1, (self.groups, -1)) for each in whole], -1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        del metadata
        cut = {f"factors.{name}.{factor.cut}": 1 if self.by_input else 0 for name, factor in self.factors.items()}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, cut, sharded_offsets
        )


class _Adapted:
    """Mixed in before the class of a linear layer that has an adapter."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if isinstance(output, tuple):  # of Transformer Engine's layer with a norm in it: the norm's output, too
            output, x = output
        adapter = getattr(self, MODULE)
        return (output + adapter(x) if adapter.on else output), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        whole = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        own = {name: value for name, value in whole.items() if not name.startswith(f"{prefix}{MODULE}.")}
        return own | getattr(self, MODULE).sharded_state_dict(f"{prefix}{MODULE}.", sharded_offsets, metadata)


def adapt(chunk: Any, adapters: Adapters) -> None:
    """Freeze a model's chunk and give the layers' linears their adapters.

    Call it before the chunk is wrapped and its optimizer is made: both take what is trained then.
    """
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        for path, held in HELD.items():
            if any(name.rpartition(".")[2] in adapters.matrices for name in held):
                _adapt_linear(layer, path, held, adapters)
    if getattr(chunk, "pre_process", False):
        # Layers that are recomputed get a gradient only through their input.
        chunk.embedding.register_forward_hook(_start_gradients)


def _start_gradients(module: Any, args: Any, output: torch.Tensor) -> None:
    del module, args
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _adapt_linear(layer: Any, path: str, held: Sequence[str], adapters: Adapters) -> None:
    one, name = dict(linears_of(layer))[path], path.rpartition(".")[2]
    config, ranks = layer.config, parallel_state.get_tensor_model_parallel_world_size()
    groups = 1
    if name == "linear_qkv":
        groups = config.num_query_groups // ranks
        widths = [config.num_attention_heads * config.kv_channels // ranks, *[groups * config.kv_channels] * 2]
    else:
        widths = [one.weight.shape[0] // len(held)] * len(held)
    one.lora_layer = layer.layer_number - 1
    adapter = Adapter(held, one, adapters, widths, by_input=path in CUT_BY_INPUT, groups=groups)
    one.add_module(MODULE, adapter)
    one.__class__ = type(f"Adapted{type(one).__name__}", (_Adapted, type(one)), {})
    if hasattr(one, "return_layernorm_output"):
        one.return_layernorm_output = True


def linears_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """The linears of one of Megatron's layers, by their path in it."""
    for path in HELD:
        owner, _, name = path.partition(".")
        yield path, getattr(getattr(layer, owner), name)


def _adapters_of(chunks: Iterable[Any]) -> Iterator[Adapter]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def factors_of(chunks: Iterable[Any]) -> list[Factor]:
    """This rank's factors, in the order of the model."""
    return [factor for adapter in _adapters_of(chunks) for factor in adapter.factors.values()]  # type: ignore[misc]


@contextmanager
def switched_off(chunks: Iterable[Any]) -> Iterator[None]:
    """The model without its adapters: the base."""
    found = list(_adapters_of(chunks))
    for adapter in found:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.on = True
