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
from retool_mcore.model.files import read_config
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.tensors import check_tensors
from retool_mcore.platforms.patches import Change, Patch, requirement


def _check_and_set_rope(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _build_tf_config(self: Any) -> None:
        original(self)
        _check_tensors(self)
        set_rope(self.provider, self.model_config.hf_config)
        if self.model_config.hf_config.model_type == "mistral":
            # Sequences stay within the window, and context parallelism needs full attention.
            self.provider.window_size = self.provider.cp_comm_type = None

    return _build_tf_config


def _check_tensors(engine: Any) -> None:
    path = engine.model_config.local_path
    values = read_config(path)
    if values.get("model_type") in FAMILIES:
        names = engine.bridge.hf_pretrained.state.source.get_all_keys()  # downloads a hub model
        check_tensors(names, values, path)


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
