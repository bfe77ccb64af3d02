"""The kernels of gated delta networks (Qwen3.5's linear attention) in SGLang, in plain PyTorch.

SGLang has them in Triton, CUDA and, with AMX, in sgl_kernel's CPU build. Names and arguments are
those of sgl_kernel. Shapes: T tokens of all requests, B requests, L tokens of the longest one,
D channels of the convolution, W its width, H value heads, K and V the dimensions of a key's and of
a value's head. A state has one slot per request: the last W - 1 inputs [D, W - 1] of the
convolution, and the matrix [H, V, K] of each head.
"""

from typing import Any

import torch
from torch.nn.functional import conv1d, rms_norm, silu, softplus
from torch.nn.utils.rnn import pad_sequence


def causal_conv1d_fn_cpu(
    inputs_DT: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve each request's tokens after its stored inputs, if it has any. Returns [D, T]."""
    outputs = []
    requests = inputs_DT.split(query_start_loc.diff().tolist(), dim=1)
    for inputs_DL, slot, continues in zip(requests, cache_indices.tolist(), has_initial_state.tolist(), strict=True):
        if not continues:
            conv_states[slot] = 0
        outputs.append(_convolve(inputs_DL[None], conv_states, torch.tensor([slot]), weight_DW, bias_D)[0])
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    inputs_BD: torch.Tensor,
    conv_states: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one more token of each request. Returns [B, D]."""
    return _convolve(inputs_BD[:, :, None], conv_states, conv_state_indices, weight_DW, bias_D)[:, :, 0]


def _convolve(
    inputs_BDL: torch.Tensor, states: torch.Tensor, slots_B: torch.Tensor, weight_DW: torch.Tensor, bias_D: Any
) -> torch.Tensor:
    inputs = torch.cat([states[slots_B].to(inputs_BDL.dtype), inputs_BDL], dim=-1)
    states[slots_B] = inputs[:, :, -states.shape[-1] :].to(states.dtype)
    return silu(conv1d(inputs, weight_DW[:, None], bias_D, groups=len(weight_DW)))


def fused_gdn_gating_cpu(
    log_rate_H: torch.Tensor, a_TH: torch.Tensor, b_TH: torch.Tensor, dt_bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each token's decay of the state, and its step size, float32 [1, T, H]."""
    decay_TH = -log_rate_H.float().exp() * softplus(a_TH.float() + dt_bias_H.float())
    return decay_TH[None], b_TH.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The outputs [1, T, H, V] of requests with several tokens each, and their states afterwards.

    Requests are padded to L tokens with decay 1 and step size 0, which change no state.
    """
    lengths = cu_seqlens.diff().tolist()
    padded = [pad_sequence(each[0].split(lengths), batch_first=True) for each in (q, k, v, g, beta)]
    outputs_BLHV, state = _delta_rule(*padded, state=initial_state)
    outputs = [outputs_LHV[:length] for outputs_LHV, length in zip(outputs_BLHV, lengths, strict=True)]
    return torch.cat(outputs)[None], state, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The outputs [1, B, H, V] of one more token of each request; updates the states."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    one_token = [each.transpose(0, 1) for each in (q, k, v, g, beta)]
    outputs, state = _delta_rule(*one_token, state=initial_state_source[initial_state_indices])
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return outputs.transpose(0, 1)


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, *, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule token by token, in float32.

    Each token scales the state by exp(decay), moves the value that the state holds for its key by
    ``step`` towards its own value, and reads the value for its query. ``q`` and ``k``: [B, L,
    heads, K], with H or fewer heads; ``v``: [B, L, H, V]; ``decay`` and ``step``: [B, L, H].
    Returns the values read [B, L, H, V] and the state [B, H, V, K].
    """
    heads = v.shape[2]
    q, k = (l2norm(each.float()).repeat_interleave(heads // each.shape[2], dim=2) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    values, state = v.float(), state.float()
    outputs = torch.empty_like(values)
    for at in range(values.shape[1]):
        state = state * decay[:, at, :, None, None].float().exp()
        missing = values[:, at] - (state @ k[:, at, :, :, None])[..., 0]
        state = state + (missing * step[:, at, :, None])[..., None] * k[:, at, :, None]
        outputs[:, at] = (state @ q[:, at, :, :, None])[..., 0]
    return outputs.to(v.dtype), state


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension of x by its length, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: None, *, z: torch.Tensor, eps: float, **_: Any
) -> torch.Tensor:
    """The norm after linear attention: SGLang's layernorm_fn as its RMSNorm calls it."""
    return (rms_norm(x.float(), weight.shape, weight.float(), eps) * silu(z.float())).to(x.dtype)


def sigmoid_mul(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The gate after full attention: SGLang's fused_sigmoid_mul."""
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def gate_sigmoid_mul_add(
    hidden_TD: torch.Tensor, weight_D: torch.Tensor, shared_TD: torch.Tensor, routed_TD: torch.Tensor
) -> None:
    """Add the gated shared expert to the routed ones: SGLang's fused_gate_sigmoid_mul_add."""
    routed_TD += (hidden_TD @ weight_D).sigmoid()[:, None] * shared_TD
