"""Configurations of Qwen3.5's text models for SGLang, which has only those of vision models."""

from dataclasses import replace
from typing import Any

from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig

SGLANG_LAYERS = {"full_attention": "attention", "linear_attention": "linear_attention"}


class TextConfig(Qwen3_5TextConfig):
    """SGLang's configuration of the text part, from the config.json of a text model.

    SGLang itself computes the layers' types from full_attention_interval, takes a
    partial_rotary_factor only from outside of rope_parameters, and always stores the convolution's
    inputs in bfloat16. Text needs no M-RoPE: its three positions are equal.
    """

    def __init__(
        self, layer_types: list[str] | None = None, rope_parameters: dict[str, Any] | None = None, **values: Any
    ) -> None:
        rope = {name: value for name, value in (rope_parameters or {}).items() if not name.startswith("mrope")}
        if "partial_rotary_factor" in rope:
            values["partial_rotary_factor"] = rope["partial_rotary_factor"]
        super().__init__(rope_parameters=rope, **values)
        self.layer_types = layer_types or []

    @property
    def layers_block_type(self) -> list[str]:
        return [SGLANG_LAYERS[kind] for kind in self.layer_types]

    @property
    def mamba2_cache_params(self) -> Any:
        params = super().mamba2_cache_params
        return replace(params, dtype=replace(params.dtype, conv=self.dtype))


class MoeTextConfig(TextConfig):
    """The same for the models with experts."""

    model_type = "qwen3_5_moe_text"

    def __init__(self, **values: Any) -> None:  # transformers would generate one that skips TextConfig's
        super().__init__(**values)
