"""Patch of verl's Megatron engine: what Megatron-Bridge does not check or compute.

Megatron-Bridge 0.5.1 leaves a weight random, with a warning, if the checkpoint lacks its name, and
ignores tensors that it does not know. It supports two types of RoPE scaling, both incompletely:
llama3 has hard-coded factors 1, 4 and 8192, and yarn ignores attention_factor. So we check the
names before verl loads a model, replace Megatron's frequencies by those that transformers computes,
and put yarn's factor into softmax_scale, which every kernel applies.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from retool_mcore.model.families import FAMILIES
from retool_mcore.model.files import read_config, tensor_files
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.tensors import check_tensors
from retool_mcore.platforms.patches import Change, Patch, requirement


def _check_and_set_rope(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _build_tf_config(self: Any) -> None:
        path = self.model_config.local_path
        values = read_config(path) or {}
        located = tensor_files(path)
        if located is not None and values.get("model_type") in FAMILIES:
            check_tensors(located[1], values, path)
        original(self)
        set_rope(self.provider, self.model_config.hf_config)

    return _build_tf_config


def set_rope(provider: Any, hf_config: Any) -> None:
    """Give the models of ``provider`` the rotary frequencies of their Hugging Face config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope_of_config(hf_config.to_dict()).kind
    if kind == "default":
        return
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if factor != 1:  # the factor scales query and key, so their product has its square
        provider.softmax_scale = factor**2 * provider.kv_channels**-0.5
    provider.position_embedding_type = "rope"
    provider.rope_scaling, provider.yarn_rotary_scaling_factor = False, None

    def replace_frequencies(chunks: Sequence[Any]) -> Sequence[Any]:
        for chunk in chunks:
            rotary = chunk.rotary_pos_emb
            rotary.inv_freq = frequencies.to(rotary.inv_freq)
        return chunks

    provider.register_pre_wrap_hook(replace_frequencies)


def _as_llama(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build Mistral as Llama, which has the same layers (for sequences within its window)."""

    @wraps(original)
    def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
        from megatron.bridge.models.llama.llama_bridge import LlamaBridge

        provider = LlamaBridge().provider_bridge(hf_pretrained)
        provider.add_bias_linear = False  # which a Llama's config.json says
        return provider

    return provider_bridge


MISTRAL_PATCH = Patch(
    changes=(
        Change(
            "megatron.bridge.models.mistral.mistral_bridge.MistralBridge.provider_bridge",
            ("self", "hf_pretrained"),
            _as_llama,
        ),
    ),
    reason="Megatron-Bridge passes yarn's factor of a Mistral to a parameter that does not exist",
    gain="Without it a Mistral with yarn fails at its start",
    applies_to=requirement("megatron-bridge"),
    remove_when="Megatron-Bridge builds a Mistral with yarn",
)
MODEL_PATCH = Patch(
    changes=(
        Change(
            "verl.workers.engine.megatron.transformer_impl.MegatronEngine._build_tf_config",
            ("self",),
            _check_and_set_rope,
        ),
    ),
    reason="Megatron-Bridge silently skips tensors whose names do not match, and computes some RoPE scalings wrongly",
    gain="Wrong result without it: training starts from a model that differs from the checkpoint, and with yarn, "
    "linear or llama3, training and engine rotate by different angles",
    applies_to=requirement("megatron-bridge"),
    remove_when="Megatron-Bridge refuses a checkpoint whose tensors differ from its mapping, and applies a "
    "configuration's rope_parameters, attention_factor included",
)
BRIDGE_PATCHES = (MODEL_PATCH, MISTRAL_PATCH)
