"""What the patches of mbridge's models are for, as without_patches.py does it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from retool_mcore.errors import CheckpointError
from tests.parity import megatron_ranks


def log_probabilities_beyond_the_original_context(folder: Path) -> str:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e3}
    model = str(megatron_ranks.make_model(folder / "yarn", rope_parameters=rope))
    return repr(megatron_ranks.run({"model": model, "actions": [["logprobs", [list(range(2, 42))]]]}))


def head_of_a_tied_llama() -> str:
    """The name that the output layer of its last pipeline stage is read by."""
    from mbridge.models.llama import LLaMABridge

    bridge: Any = LLaMABridge.__new__(LLaMABridge)
    bridge.hf_config = SimpleNamespace(tie_word_embeddings=True)
    bridge._adjust_mapping_for_shared_weights()
    return repr(bridge._weight_name_mapping_mcore_to_hf("output_layer.weight"))


def load_a_model_with_more_biases(folder: Path) -> str:
    model = str(megatron_ranks.make_model(folder / "biased", "llama", attention_bias=True))
    try:
        megatron_ranks.run({"model": model, "actions": []})
    except CheckpointError as refused:
        return "refused" if "self_attn.o_proj.bias" in str(refused) else repr(refused)
    return "loaded"
