"""Creates the quickstart's model: a Qwen2 with under a million parameters, and its tokenizer.

The weights are random. The tokenizer is a ``Qwen2Tokenizer`` whose byte-level BPE is trained on the
task's words, so that each word is a single token. As in Qwen2, each digit is a separate token. Any
other text is encoded byte by byte.
"""

# transformers is only partly typed.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retool_mcore.data.files import replacing

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen2Config

CONTROL_TOKENS = END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Megatron pads the vocabulary to a multiple of 128 per tensor-parallel rank. A multiple of 256
# needs no padding at tp = 1 or 2.
VOCAB_MULTIPLE = 256
MAX_MODEL_TOKENS = 1024
MODEL_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
ROPE_THETA = 100.0  # for short conversations; high frequencies distinguish adjacent digits
INITIALIZER_RANGE = 0.06  # with 0.02, the model learns to copy digits a hundred steps later or never

# Like Qwen2.5's template, except that it lists tools by their signatures, which is shorter.
CHAT_TEMPLATE = """\
{%- set first = messages[0] -%}
{%- if tools or first.role == 'system' -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if first.role == 'system' -%}{{- first.content -}}{%- endif -%}
    {%- if tools -%}
        {{- '\\n# Tools' -}}
        {%- for tool in tools -%}
            {%- set function = tool.function -%}
            {{- '\\n' + function.name + '(' + function.parameters.properties | join(', ') + '): ' -}}
            {{- function.description -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif not (loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(rows: Iterable[Mapping[str, Any]]) -> PreTrainedTokenizerBase:
    """Train the tokenizer on SFT rows {messages, tools}.

    Digits never merge, so the result does not depend on the numbers in the rows.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    # Use Qwen2Tokenizer, because transformers loads that class for model_type qwen2 regardless of
    # tokenizer_config.json.
    blank = Qwen2Tokenizer(eos_token=END_OF_TURN, pad_token=END_OF_TEXT, model_max_length=MAX_MODEL_TOKENS)
    blank.chat_template = CHAT_TEMPLATE
    texts = [str(blank.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)) for row in rows]
    markup = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *TOOL_MARKS)))
    tokenizer: PreTrainedTokenizerBase = cast("Any", blank).train_new_from_iterator(
        [[piece for text in texts for piece in markup.split(text)]],
        vocab_size=8192,  # never reached: merging stops once every word is a single token
        min_frequency=1,
        new_special_tokens=list(CONTROL_TOKENS),
        show_progress=False,
    )
    # Not special, as in Qwen2.5, so that decoding with skip_special_tokens keeps them.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    tokenizer.chat_template = CHAT_TEMPLATE  # train_new_from_iterator does not carry it over
    return tokenizer


def write_model(directory: Path, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Write a Qwen2ForCausalLM with its tokenizer and generation config.

    ``seed`` initialises the float32 weights.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  its filename is a bare PathLike
    from transformers import GenerationConfig, Qwen2Config

    tokens: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        dtype="float32",
        **MODEL_SHAPE,
        **tokens,
    )
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    GenerationConfig(**tokens).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with replacing(directory / "model.safetensors") as temporary:
        save_file(_random_weights(config, seed), temporary, metadata={"format": "pt"})


def _random_weights(config: Qwen2Config, seed: int) -> dict[str, torch.Tensor]:
    """Qwen2's weights by name, initialised as in transformers: normal matrices, biases 0, norms 1.

    This code duplicates transformers' initialisation, because its Qwen2 modules take seconds to
    import.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, inner = MODEL_SHAPE["hidden_size"], MODEL_SHAPE["intermediate_size"]
    head_size = hidden // MODEL_SHAPE["num_attention_heads"]
    queries, keys = (MODEL_SHAPE[f"num_{name}_heads"] * head_size for name in ("attention", "key_value"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * INITIALIZER_RANGE

    weights = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{name}.self_attn.{letter}_proj.weight"] = matrix(rows, hidden)
            weights[f"{name}.self_attn.{letter}_proj.bias"] = torch.zeros(rows)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, queries)
        weights[f"{name}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{name}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[f"{name}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(hidden)
    return weights | {"model.norm.weight": torch.ones(hidden), "lm_head.weight": matrix(config.vocab_size, hidden)}
