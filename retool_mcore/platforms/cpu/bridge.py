"""mbridge's bridges for models with plain PyTorch layers."""

from typing import Any

from mbridge.core import LLMBridge, register_model
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from retool_mcore.platforms.cpu.layers import plain_torch_spec

NO_FUSION = {  # TransformerConfig enables these fused kernels by default, but they need CUDA
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}


class _PlainTorchBridge(LLMBridge):
    """Mixin for one of mbridge's bridges; list it before mbridge's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # mbridge changes this class attribute for a tied model, which would affect the next model.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        self._MLP_MAPPING = {
            **self._MLP_MAPPING,
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        }
        self._OTHER_MAPPING = {
            **self._OTHER_MAPPING,
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        }
        super().__init__(*args, **kwargs)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> TransformerConfig:
        return super()._build_base_config(text_config_key, **{**kwargs, **NO_FUSION})

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True  # mbridge: this megatron-core's GPTModel takes vp_stage
        block = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)
        return plain_torch_spec(block, qk_norm=self.config.qk_layernorm)


@register_model("qwen2")
class PlainTorchQwen2Bridge(_PlainTorchBridge, Qwen2Bridge):
    """Qwen2 and Qwen2.5."""


@register_model("qwen3")
class PlainTorchQwen3Bridge(_PlainTorchBridge, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen3_moe")
class PlainTorchQwen3MoEBridge(_PlainTorchBridge, Qwen3MoEBridge):
    """Qwen3 with experts."""

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> TransformerConfig:
        return super()._build_base_config(text_config_key, **{**kwargs, "moe_grouped_gemm": False})


@register_model(["llama", "mistral"])
class PlainTorchLlamaBridge(_PlainTorchBridge, LLaMABridge):
    """Llama; and Mistral, which has the same layers, for sequences within its window."""
