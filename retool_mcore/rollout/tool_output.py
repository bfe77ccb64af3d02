"""Fits an interpreter's output into its token budget: keeps head and tail, notes the cut.

Prints come first and the error of a traceback comes last, so the middle is cut. The kept text
encodes to at most the budget, counted by the model's tokenizer; the line that notes the cut comes
on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARS_PER_TOKEN = 16  # per token of budget; a longer text is cut before it is tokenized. Prose has 4, code 3

_KEPT_WINDOWS = 64  # of a huge text, before it is cleaned

_Span = tuple[int, int]  # characters [start, end) of one token


def cut_middle(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """``text`` with its middle cut to at most ``max_tokens`` tokens, and the number of tokens cut.

    The number is exact for a text of up to CHARS_PER_TOKEN characters per token of budget. A longer
    text is always cut and tokenized at both ends only; the number is then an estimate from the two
    ends, and the note to the model says "about".
    """
    if len(text) <= max_tokens and text.isascii():
        return text, 0  # a token of ASCII text is at least one character
    window = CHARS_PER_TOKEN * max_tokens
    whole = len(text) <= window
    front, back = (text, text) if whole else (text[: window // 2], text[-window // 2 :])
    front_spans = _spans(tokenizer, front)
    if whole and len(front_spans) <= max_tokens:
        return text, 0
    back_spans = front_spans if whole else _spans(tokenizer, back)
    head, head_tokens = _head(tokenizer, front, front_spans, (max_tokens + 1) // 2)
    tail, tail_tokens = _tail(tokenizer, back, back_spans, max_tokens // 2)
    if whole:
        cut_tokens, told = len(front_spans) - head_tokens - tail_tokens, ""
    else:
        tokens_per_char = (len(front_spans) + len(back_spans)) / (len(front) + len(back))
        cut_tokens, told = round((len(text) - len(head) - len(tail)) * tokens_per_char), "about "
    return f"{head}\n[... {told}{cut_tokens} tokens cut here ...]\n{tail}", cut_tokens


def without_middle(text: str, max_tokens: int) -> str:
    """``text``, of which a middle that ``cut_middle`` never looks at is gone.

    What is left is still longer than its window, so it is cut and the model is told; the number of
    tokens told is then that of what is left.
    """
    kept = _KEPT_WINDOWS * CHARS_PER_TOKEN * max_tokens
    return text if len(text) <= kept else text[: kept // 2] + text[-kept // 2 :]


def _head(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest beginning that ends at a token's end and fits ``max_tokens``, and its tokens."""
    for count in range(min(max_tokens, len(spans)), 0, -1):
        # A character that spans several tokens has the same span in each of them: drop all of it,
        # not a part.
        end = min(spans[count - 1][1], spans[count][0]) if count < len(spans) else len(text)
        head = text[:end]
        tokens = len(_spans(tokenizer, head))  # cut text may encode differently: a word's start, spaces before a word
        if tokens <= max_tokens:
            return head, tokens
    return "", 0


def _tail(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest end that starts at a token's start and fits ``max_tokens``, and its tokens."""
    for count in range(min(max_tokens, len(spans)), 0, -1):
        start = max(spans[-count][0], spans[-count - 1][1]) if count < len(spans) else 0
        tail = text[start:]
        tokens = len(_spans(tokenizer, tail))
        if tokens <= max_tokens:
            return tail, tokens
    return "", 0


def _spans(tokenizer: PreTrainedTokenizerBase, text: str) -> list[_Span]:
    # verbose=False: do not warn that the text is longer than the model's context; it is cut here.
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
