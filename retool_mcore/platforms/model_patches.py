"""What mbridge leaves out of a model: its positions' scaling, a tied Llama's head, unknown tensors.

Megatron-core 0.16.1 has parts of two scalings: llama3 with 1, 4 and 8192 written in, and yarn
without attention_factor, whose factor its fused kernel for packed sequences drops. So frequencies
are computed by ``model/rope.py`` and put in the place of Megatron's, and yarn's factor goes into
the scale of the scores, which every kernel heeds.
"""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from retool_mcore.model.families import FAMILIES
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.tensors import EMBEDDING, check_tensors
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement


def _positions_of_the_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's rotary frequencies become those that the model's configuration has."""

    @wraps(original)
    def _model_provider(self: Any, *args: Any, **kwargs: Any) -> Any:
        build = original(self, *args, **kwargs)
        rope = rope_of_config(self.hf_config.to_dict())
        if rope.kind == "default":
            return build
        width = self.config.kv_channels
        if rope.attention_factor != 1:  # cosines and sines turn query and key alike, so a score has its square
            self.config.softmax_scale = rope.attention_factor**2 * width**-0.5

        @wraps(build)
        def provider(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            rotary = model.rotary_pos_emb
            rotary.inv_freq = rope.frequencies(width).to(rotary.inv_freq)
            rotary.seq_len_interpolation_factor = None  # mbridge's Llama sets it for any type of scaling
            return model

        return provider

    return _model_provider


def _tied(original: Callable[..., None]) -> Callable[..., None]:
    """Where a tied model's last pipeline stage has an output layer, it is read as the embedding."""

    @wraps(original)
    def _adjust_mapping_for_shared_weights(self: Any) -> None:
        original(self)
        if getattr(self.hf_config, "tie_word_embeddings", False):
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": EMBEDDING}

    return _adjust_mapping_for_shared_weights


def _whole(original: Callable[..., None]) -> Callable[..., None]:
    """Load a checkpoint only if each of its tensors has a place in the model.

    A critic's output layer is its value head, which no language model's checkpoint has. mbridge
    leaves it out, too, but reads the language model's head before that, and a tied model has none.
    """

    @wraps(original)
    def load_weights(self: Any, models: Any, weights_path: str, *args: Any, **kwargs: Any) -> None:
        config = Path(self._get_actual_hf_path(weights_path), "config.json")
        values = json.loads(config.read_text(encoding="utf-8"))
        if values.get("model_type") in FAMILIES:
            check_tensors(self._get_safetensor_io(weights_path).load_hf_weight_names(), values, weights_path)
        critic = not getattr(self.hf_config, "tie_word_embeddings", False)  # verl unties its configuration
        if not (critic and values.get("tie_word_embeddings", False)):
            return original(self, models, weights_path, *args, **kwargs)
        all_weights = self._weight_name_mapping_mcore_local_to_global
        self._weight_name_mapping_mcore_local_to_global = lambda model: {
            local: name for local, name in all_weights(model).items() if name != "output_layer.weight"
        }
        try:
            return original(self, models, weights_path, *args, **kwargs)
        finally:
            del self._weight_name_mapping_mcore_local_to_global

    return load_weights


MODEL_PATCHES = (
    Patch(
        target="mbridge.core.llm_bridge.LLMBridge._model_provider",
        replace=_positions_of_the_config,
        reason="it hands over rope_theta alone: yarn, linear and llama3 scaling would be dropped in silence",
        applies_to=requirement("mbridge"),
        remove_when="mbridge and Megatron-core apply a configuration's rope_parameters, attention_factor included",
    ),
    Patch(
        target="mbridge.models.llama.LLaMABridge._adjust_mapping_for_shared_weights",
        replace=_tied,
        reason="a Llama with tied embeddings, as Llama-3.2 and SmolLM2 are, is not loaded into pipeline stages",
        applies_to=requirement("mbridge"),
        remove_when="mbridge's bridge of Llama maps tied embeddings, as that of Qwen2 does",
    ),
    Patch(
        target="mbridge.core.bridge.Bridge.load_weights",
        replace=_whole,
        reason="it leaves out tensors that it does not know, as biases, and trains another model than the file's",
        applies_to=requirement("mbridge"),
        remove_when="mbridge refuses a checkpoint with tensors that it does not map",
    ),
)
