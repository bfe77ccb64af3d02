"""Transformer Engine's modules of a GPT layer in plain PyTorch.

Megatron-core's local modules are not enough: WrappedTorchNorm does not support sequence
parallelism, and DotProductAttention supports neither packed sequences nor context parallelism. The
modules here have the parameter names of Transformer Engine's, so that a checkpoint has the same
names on every platform.

Shapes: S tokens of one sequence, T tokens of a packed batch (on this rank), B batch, H query heads
and K key/value heads of this tensor-parallel rank (H a multiple of K), D head width, C
context-parallel ranks.
"""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention


class ColumnExperts(torch.nn.Module):
    """Holds the matrices linear_fc1 of all experts on this rank."""


class RowExperts(torch.nn.Module):
    """Holds the matrices linear_fc2 of all experts on this rank."""


EXPERT_LINEARS = {"linear_fc1": ColumnExperts, "linear_fc2": RowExperts}
_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool) -> torch.Tensor:
    """Normalize x's last dimension, in float32; ``zero_centered``: the factor is 1 + weight."""
    factor = 1 + weight.float() if zero_centered else weight.float()
    return torch.nn.functional.rms_norm(x.float(), weight.shape, factor, eps).to(x.dtype)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """A norm's initial weight [size].

    With sequence parallelism each rank normalizes its share of the tokens. The weight is marked so
    that Megatron sums its gradient over the tensor-parallel group.
    """
    assert config.normalization == "RMSNorm", f"not built for {config.normalization}"
    start = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    weight = torch.nn.Parameter(torch.full((size,), start, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear.

    Megatron-Bridge knows by the end of the name how its parameters are sharded.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.return_layernorm_output = False  # platforms/lora.py sets it

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        config = self.config
        zero_centered = config.layernorm_zero_centered_gamma
        normed = _rms_norm(x, self.layer_norm_weight, config.layernorm_epsilon, zero_centered=zero_centered)
        output, bias = super().forward(normed, *args, **kwargs)
        return ((output, normed) if self.return_layernorm_output else output), bias


class _GatherFromContextParallel(torch.autograd.Function):
    """[...] on each rank -> [C, ...] on all; backward sums the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class Attention(MegatronModule):
    """Causal grouped-query attention with the interface of TEDotProductAttention.

    Takes a right-padded batch (query [S, B, H, D], key and value [S, B, K, D], returns [S, B, H*D])
    or packed sequences (query [T, H, D], key and value [T, K, D], returns [T, H*D]). Padding is at
    the end of a sequence, so the causal mask alone hides it from real tokens.

    With context parallelism a sequence is split into 2C chunks, and rank r has chunks r and 2C-1-r
    (the zig-zag layout of Megatron and verl, which balances causal work). Each rank gathers the
    keys and values of all ranks.
    """

    def __init__(  # noqa: PLR0917  Megatron's contract
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self", f"not built for {attention_type}-attention"
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(  # noqa: PLR0917  Megatron's contract
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        assert attention_bias is None, "attention_bias is not supported"
        key_value = torch.stack([key, value])
        if self.cp_group is not None:
            key_value = _GatherFromContextParallel.apply(key_value, self.cp_group)
        if packed_seq_params is not None:
            return self._packed(query, key_value, packed_seq_params)
        if self.cp_group is None:  # all sequences of the batch at once
            return self._attend(query.transpose(0, 1), *key_value.transpose(1, 2), mask=None).transpose(0, 1)
        rows = [self._one(query[:, b], key_value[:, :, :, b]) for b in range(query.shape[1])]
        return torch.stack(rows, dim=1)

    def _packed(self, query: torch.Tensor, key_value: torch.Tensor, packed: PackedSeqParams) -> torch.Tensor:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        ranks = 1 if self.cp_group is None else self.cp_group.size()
        ends = [int(end) // ranks for end in bounds.tolist()]
        parts = [
            self._one(query[start:end], key_value[..., start:end, :, :]) for start, end in pairwise(ends) if end > start
        ]
        if ends[-1] < query.shape[0]:  # padding at the end of the batch
            parts.append(query.new_zeros(query.shape[0] - ends[-1], query.shape[1] * query.shape[2]))
        return torch.cat(parts)

    def _one(self, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Attend within one sequence: query [S/C, H, D] -> [S/C, H*D].

        key_value is [2, S, K, D] or, gathered, [C, 2, S/C, K, D].
        """
        if self.cp_group is None:
            return self._attend(query[None], key_value[0][None], key_value[1][None], mask=None)[0]
        ranks, rank, half = self.cp_group.size(), self.cp_group.rank(), query.shape[0] // 2
        first = [key_value[r, :, :half] for r in range(ranks)]
        last = [key_value[r, :, half:] for r in reversed(range(ranks))]
        key, value = torch.cat([*first, *last], dim=1)
        chunk = torch.arange(half)
        query_at = torch.cat([rank * half + chunk, (2 * ranks - 1 - rank) * half + chunk])
        mask = query_at[:, None] >= torch.arange(2 * ranks * half)[None, :]
        return self._attend(query[None], key[None], value[None], mask=mask)[0]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """query [B, S, H, D], key and value [B, S', K, D] -> [B, S, H*D]; causal without a mask."""
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2).flatten(2)


class PlainTorchExperts(SequentialMLP):
    """Runs the experts one by one; names weights as Transformer Engine's grouped experts do.

    For example linear_fc1.weight7: the bridge reads the expert's number from the name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = tuple(self.local_experts)
        del self.local_experts  # a ModuleList would register each weight under a second name
        object.__setattr__(self, "local_experts", experts)
        for name, holder in EXPERT_LINEARS.items():
            named = holder()
            for index, expert in enumerate(experts):
                named.register_parameter(f"weight{index}", getattr(expert, name).weight)
            self.add_module(name, named)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        shards: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        return {_LOCAL_EXPERT.sub(r"\2.weight\1", name): shard for name, shard in shards.items()}


class PlainTorch(LocalSpecProvider):
    """Takes the place of Megatron's TESpecProvider: the modules of a layer."""

    def linear(self) -> type:
        raise NotImplementedError("this platform has no replicated linear, which only multi-latent attention needs")

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return RMSNorm

    def core_attention(self) -> type:
        return Attention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        modules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(PlainTorchExperts, submodules=modules)
