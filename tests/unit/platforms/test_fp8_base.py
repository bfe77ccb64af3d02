"""A frozen base in FP8: its rounding, its gradients, and one dequantized matrix at a time."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from retool_mcore.model.adapter import from_fp8, rounded, row_scales, to_fp8
from tests.unit.platforms.test_lora_layers import FFN, HIDDEN, Fused, Plain, adapted, alone

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
__all__ = ["alone"]  # a fixture
PATHS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class SavesItsOutput(Plain):
    def forward(self, x: torch.Tensor) -> tuple[Any, None]:
        return torch.nn.functional.linear(x, self.weight).tanh(), None


def stored(chunk: Any) -> Any:
    from retool_mcore.platforms.lora import quantize_base

    quantize_base(chunk)
    return chunk


def linears(chunk: Any) -> list[Any]:
    return [chunk.decoder.layers[0].get_submodule(path) for path in PATHS]


def run(chunk: Any, x: torch.Tensor, *, recomputed: bool = False) -> tuple[torch.Tensor, list[Any]]:
    """The layers one after another; the output, and gradients of the input and the adapters."""
    qkv, proj, fc1, fc2 = linears(chunk)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = proj(qkv(x)[0][..., : proj.weight.shape[1]].tanh())[0]
        return fc2(fc1(x + h)[0][..., :FFN].tanh())[0]

    x = x.clone().requires_grad_(True)
    output = checkpoint(forward, x, use_reentrant=True) if recomputed else forward(x)
    output.square().sum().backward()
    return output.detach(), [x.grad, *(each.grad for each in chunk.parameters() if each.requires_grad)]


def test_a_rows_scale_brings_its_largest_value_to_the_top_of_float8():
    weight = torch.tensor([[448.0, 17.0, -1.0], [449.0, 17.0, 0.0], [2.0**-10, 2.0**-24, 0.0], [0.0, 0.0, 0.0]])
    scales = row_scales(weight.abs().amax(1), torch.float32)
    assert scales.tolist() == [[1.0], [2.0], [2.0**-18], [1.0]]
    # 17 and 449 take five and nine binary digits, of which four stay.
    once = rounded(weight)
    assert once.tolist() == [[448.0, 16.0, -1.0], [448.0, 16.0, 0.0], [2.0**-10, 2.0**-24, 0.0], [0.0] * 3]
    assert torch.equal(rounded(once), once)
    assert to_fp8(weight, scales).element_size() == 1
    assert torch.equal(from_fp8(to_fp8(weight, scales), scales), once)
    assert torch.equal(rounded(weight[:1].bfloat16()), once[:1].bfloat16())


@pytest.mark.parametrize(("kind", "recomputed"), [(Plain, True), (Fused, False), (SavesItsOutput, True)])
def test_a_stored_layer_computes_and_learns_as_one_with_rounded_weights(
    alone: None, kind: type[Plain], recomputed: bool
):
    torch.manual_seed(0)
    chunk = adapted(kind, "q_proj", "o_proj", "up_proj")  # the last of the four has no adapter
    twin = adapted(kind, "q_proj", "o_proj", "up_proj")
    twin.load_state_dict(chunk.state_dict())
    for one in linears(twin):
        one.weight.data = rounded(one.weight.data)
    x = torch.randn(4, 2, HIDDEN)
    plain, _ = run(chunk, x)
    chunk.zero_grad()
    want, got = run(twin, x, recomputed=recomputed), run(stored(chunk), x, recomputed=recomputed)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[0], plain)
    assert len(got[1]) == 7
    for one, other in zip(got[1], want[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("recomputed", "times"), [(False, 8), (True, 12)])
def test_only_one_matrix_is_dequantized_at_a_time(
    alone: None, recomputed: bool, times: int, monkeypatch: pytest.MonkeyPatch
):
    from retool_mcore.platforms import lora

    chunk = stored(adapted(Plain, "q_proj", "o_proj", "up_proj"))
    made: list[int] = []

    def counted(*args: torch.Tensor) -> torch.Tensor:
        made.append(sum(one.live_storage() is not None for one in linears(chunk)))
        return from_fp8(*args)

    monkeypatch.setattr(lora, "from_fp8", counted)
    run(chunk, torch.randn(4, 2, HIDDEN), recomputed=recomputed)
    assert made == [0] * times, "whole ones while another was made"
    for one in linears(chunk):
        assert one.live_storage() is None
        assert one.weight.element_size() == 1 and one.weight.untyped_storage().nbytes() == one.weight.numel()


def test_a_weight_that_was_moved_is_read_where_it_is(alone: None):
    """The idle actor's weights go to the host and back, by their parameters' data."""
    chunk = stored(adapted(Plain, "q_proj"))
    x = torch.randn(4, 2, HIDDEN)
    want, _ = run(chunk, x)
    for one in linears(chunk):
        old, one.weight.data = one.weight.data, one.weight.data.clone()
        old.view(torch.uint8).zero_()
    assert torch.equal(run(chunk, x)[0], want)


def test_an_output_without_a_backward_pass_is_freed(alone: None):
    layer = stored(adapted(SavesItsOutput, "o_proj")).decoder.layers[0].self_attention.linear_qkv
    output = layer(torch.randn(4, 2, HIDDEN, requires_grad=True))[0]
    held = weakref.ref(output.untyped_storage())
    del output
    assert held() is None and layer.live_storage() is None
