"""SGLang builds the layers that the settings ask for in FP8."""

import asyncio
from typing import Any

import pytest
import torch

from tests.unit.verl.test_engine_settings import (
    adapter,  # noqa: F401  a fixture
    worker_with,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("verl_on_cpu")]


def test_the_engine_gets_layers_in_fp8_and_the_rest_as_it_is(adapter: Any, monkeypatch: pytest.MonkeyPatch):
    """The weights that verl's adapter would send, by the config that ours leaves it."""
    from verl.utils.sglang.sglang_fp8_utils import SGLangFP8QuantizerHelper

    worker_with(adapter, monkeypatch)
    torch.manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(256, 128),
        "model.layers.0.mlp.up_proj.weight": torch.randn(256, 128) * 0.02,
        "model.layers.0.input_layernorm.weight": torch.ones(128),
    }

    async def sent() -> dict[str, torch.Tensor]:
        helper = SGLangFP8QuantizerHelper(adapter.model_config.hf_config.quantization_config)
        return {
            name: tensor async for name, tensor in helper.quant_weights_by_name(weights.items(), dtype=torch.float32)
        }

    exact = weights["model.layers.0.mlp.up_proj.weight"].clone()  # the plain form works in place
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr("verl.utils.kernel.fp8_kernel._DISABLE_TRITON_FP8", True)  # its plain form, for a CPU
    got = asyncio.run(sent())
    up, scale = (got.pop(f"model.layers.0.mlp.up_proj.weight{part}") for part in ("", "_scale_inv"))
    assert {name: tensor.dtype for name, tensor in got.items()} == dict.fromkeys(got, torch.float32) and len(got) == 2
    assert up.dtype == torch.float8_e4m3fn and scale.shape == (2, 1)
    back = up.float() * scale.repeat_interleave(128, 0)
    # three bits of mantissa; below the smallest normal number, 2**-6, steps of 2**-9
    worst = ((back - exact).abs() - exact.abs() / 16).max()
    assert worst <= scale.max() * 2**-10
