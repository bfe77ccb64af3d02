"""The linear attention of platform cpu: what transformers computes, in one prefill or in parts."""

from typing import Any

import torch
from torch.nn.functional import conv1d, pad, silu

from retool_mcore.platforms.cpu import linear_attention as ours

LENGTHS = (1, 5, 70)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
QUERIES, HEADS, K, V, WIDTH = 2, 4, 8, 6, 4
CHANNELS = 5


def layer(tokens: int) -> dict[str, torch.Tensor]:
    """Random inputs of ``tokens`` tokens."""
    torch.manual_seed(0)
    heads = {"q": (QUERIES, K), "k": (QUERIES, K), "v": (HEADS, V)}
    tensors = {name: torch.randn(1, tokens, *shape) for name, shape in heads.items()}
    return tensors | {"a": torch.randn(tokens, HEADS), "b": torch.randn(tokens, HEADS)}


def test_a_prefill_computes_what_transformers_does_for_each_request():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    x, log_rate, dt_bias = layer(int(STARTS[-1])), torch.randn(HEADS), torch.randn(HEADS)
    g, beta = ours.fused_gdn_gating_cpu(log_rate, x["a"], x["b"], dt_bias)
    states = torch.randn(len(LENGTHS), HEADS, V, K)
    qkv = {name: x[name] for name in ("q", "k", "v")}
    got, after, _ = ours.chunk_gated_delta_rule_cpu(**qkv, g=g, beta=beta, initial_state=states, cu_seqlens=STARTS)
    for request, (start, end) in enumerate(zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True)):
        parts: dict[str, Any] = {name: each[:, start:end] for name, each in qkv.items()}
        for name in ("q", "k"):
            parts[name] = parts[name].repeat_interleave(HEADS // QUERIES, dim=2)
        want, state = torch_chunk_gated_delta_rule(
            parts["q"], parts["k"], parts["v"], g=g[:, start:end], beta=beta[:, start:end],
            initial_state=states[request : request + 1].transpose(-1, -2), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert state is not None
        torch.testing.assert_close(got[:, start:end], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[request], state[0].transpose(-1, -2), atol=1e-5, rtol=1e-5)


def test_decoding_continues_a_prefill():
    x, log_rate, dt_bias = layer(6), torch.randn(HEADS), torch.randn(HEADS)
    g, beta = ours.fused_gdn_gating_cpu(log_rate, x["a"], x["b"], dt_bias)
    qkv = {name: x[name] for name in ("q", "k", "v")}
    zero = torch.zeros(1, HEADS, V, K)
    whole, after, _ = ours.chunk_gated_delta_rule_cpu(
        **qkv, g=g, beta=beta, initial_state=zero, cu_seqlens=torch.tensor([0, 6])
    )
    pool, slot = torch.zeros(4, HEADS, V, K), torch.tensor([2])
    for at in range(6):
        one = {name: each[:, at : at + 1] for name, each in qkv.items()}
        gates = {name: x[name][at : at + 1] for name in ("a", "b")}
        got = ours.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=log_rate, dt_bias=dt_bias, **one, **gates, initial_state_source=pool, initial_state_indices=slot
        )
        torch.testing.assert_close(got[0], whole[0, at : at + 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool[2], after[0], atol=1e-5, rtol=1e-5)
    assert not pool[[0, 1, 3]].any(), "states of other requests stay"


def test_the_convolution_continues_where_a_request_stopped():
    """Two requests as prefills of all but three tokens and of two more, and one decoded token."""
    torch.manual_seed(0)
    weight, slots = torch.randn(CHANNELS, WIDTH), torch.tensor([2, 0])
    requests = [torch.randn(CHANNELS, length) for length in (5, 70)]
    padded = [pad(inputs, (WIDTH - 1, 0)) for inputs in requests]
    want = [silu(conv1d(inputs[None], weight[:, None], groups=CHANNELS))[0] for inputs in padded]
    states = torch.randn(4, CHANNELS, WIDTH - 1)  # those of earlier requests
    untouched = states[[1, 3]]

    def prefill(part: slice, *, continues: bool) -> torch.Tensor:
        parts = [inputs[:, part] for inputs in requests]
        return ours.causal_conv1d_fn_cpu(
            torch.cat(parts, dim=1), weight, None, activation="silu", conv_states=states,
            has_initial_state=torch.tensor([continues] * 2), cache_indices=slots,
            query_start_loc=torch.tensor([0, *(each.shape[1] for each in parts)]).cumsum(0), seq_lens_cpu=None,
        )  # fmt: skip

    for part, continues in ((slice(None, -3), False), (slice(-3, -1), True)):
        got = prefill(part, continues=continues)
        torch.testing.assert_close(got, torch.cat([each[:, part] for each in want], dim=1))
    last = ours.causal_conv1d_update_cpu(
        torch.stack([inputs[:, -1] for inputs in requests]), states, weight, None, "silu", conv_state_indices=slots
    )
    torch.testing.assert_close(last, torch.stack([each[:, -1] for each in want]))
    assert torch.equal(states[slots], torch.stack([inputs[:, -(WIDTH - 1) :] for inputs in padded]))
    assert torch.equal(states[[1, 3]], untouched)
