"""Writes small GGUF files of the quickstart's model, with llama.cpp's names of tensors and keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from retool_mcore.data.task_model import CONTROL_TOKENS, END_OF_TEXT, END_OF_TURN, TOOL_MARKS

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TENSORS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
NUMBERS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads", "layer_norm_rms_eps": "rms_norm_eps",
}  # fmt: skip
MODEL_NAME = "Coin 0.1B Instruct"  # published files have one, and it gets into config.json


def write_gguf(
    folder: Path, file: Path, *, eos: str = END_OF_TURN, output_noise: float | None = None
) -> dict[str, Any]:
    """The model of a Hugging Face folder as GGUF, in float32.

    ``output_noise``: the output matrix is the embedding's, changed by this share, as a second
    quantisation changes it. None keeps its own. Returns the weights by their names in the folder.
    """
    import gguf

    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    backend: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = backend["model"]["vocab"] | {each["content"]: each["id"] for each in backend["added_tokens"]}
    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    types = [UNUSED] * len(tokens)
    for token, index in ids.items():
        tokens[index] = token
        types[index] = CONTROL if token in CONTROL_TOKENS else USER_DEFINED if token in TOOL_MARKS else NORMAL
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_name(MODEL_NAME)
    for key, name in NUMBERS.items():
        getattr(writer, f"add_{key}")(config[name])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]])
    writer.add_eos_token_id(ids[eos])
    writer.add_eot_token_id(ids[END_OF_TURN])
    writer.add_pad_token_id(ids[END_OF_TEXT])
    writer.add_bos_token_id(ids[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    if output_noise is not None:
        table = weights["model.embed_tokens.weight"]
        draw = np.random.default_rng(0).standard_normal(table.shape).astype(np.float32)
        weights["lm_head.weight"] = table + output_noise * table.std() * draw
    for name, values in weights.items():
        stem, kind = name.rsplit(".", 1)
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        own = f"blk.{layer}.{TENSORS[rest]}" if stem.startswith("model.layers.") else TENSORS[stem]
        writer.add_tensor(f"{own}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
