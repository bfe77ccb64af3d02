"""The kernels of Gated DeltaNet layers in plain PyTorch.

The functions have names and parameters of flash-linear-attention's, as Megatron-core calls them
(megatron/core/ssm/gated_delta_net.py).

Shapes: B batch, T tokens, C channels, K width of the convolution, H heads, D head width. With
``cu_seqlens`` [N + 1], a batch of one row has N packed sequences, which start at these tokens.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from torch.nn.functional import conv1d, silu


def _of_each_sequence(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Apply ``function`` to inputs [B, T, ...], or to each sequence of a packed batch."""
    if cu_seqlens is None:
        return function(*inputs)
    spans = [(start, end) for start, end in pairwise(cu_seqlens.tolist()) if end > start]
    return torch.cat([function(*(tensor[:, start:end] for tensor in inputs)) for start, end in spans], dim=1)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel of x [B, T, C] with its weight [C, K] and apply SiLU."""
    assert activation in ("silu", "swish"), activation
    assert initial_state is None and not output_final_state, "not built for inference"

    def convolve(rows: torch.Tensor) -> torch.Tensor:
        channels, width = weight.shape
        padded = conv1d(rows.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels)
        return silu(padded[..., : rows.shape[1]]).transpose(1, 2)

    return _of_each_sequence(convolve, (x,), cu_seqlens), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule of q, k and v [B, T, H, D], log decay g and beta [B, T, H] -> like v."""
    assert not any(options.values()), f"not built for {options}"

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = inputs
        output, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta)
        return output

    return _of_each_sequence(attend, (q, k, v, g, beta), cu_seqlens), None
