"""What we use of transformers' tokenizers, with types: its own say only half of them."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def from_pretrained(path: str) -> PreTrainedTokenizerBase:
    """Read a tokenizer; code that comes with it is not run. Raises whatever transformers raises.

    See ``chat.load_tokenizer``.
    """
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path, trust_remote_code=False))


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the tokenizer came from: a directory or a hub name; "" if it was made in memory."""
    return cast("str", tokenizer.name_or_path)


def has_several_templates(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has templates by name, such as "default" and "tool_use"."""
    return isinstance(cast("Any", tokenizer).chat_template, dict)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text, with nothing added."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text that follows other tokens.

    Some tokenizers of the SentencePiece kind (Mistral's first ones) put a space before the first
    word of whatever they encode, which is none of a later piece.
    """
    guard = _guard(tokenizer)
    return encode(tokenizer, guard + text)[1:] if guard else encode(tokenizer, text)


@lru_cache(maxsize=8)
def _guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A control token after which a piece is encoded, where that makes a difference."""
    for token in (tokenizer.bos_token, tokenizer.eos_token):
        if isinstance(token, str):
            ids = encode(tokenizer, f"{token}x")
            return token if len(encode(tokenizer, token)) == 1 and ids[1:] != encode(tokenizer, "x") else ""
    return ""


def decode(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    clean_up: bool | None = None,
    control_tokens: bool = True,
) -> str:
    """The text of token ids [T], with or without control tokens.

    ``clean_up``: whether spaces before punctuation are removed; None: as the tokenizer is set.
    """
    skip = not control_tokens
    # Of a list transformers asks each number what it is, which takes longer than decoding them all.
    ids = np.asarray(token_ids, dtype=np.int64)
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean_up)
    assert isinstance(text, str), "one sequence decodes to one string"
    return text


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """One conversation as text. Raises jinja2.TemplateError when the template refuses it."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] if tools else None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert isinstance(text, str), "apply_chat_template(tokenize=False) of one conversation gives one string"
    return text
