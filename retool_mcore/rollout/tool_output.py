"""An interpreter's output within its budget of tokens: head and tail are kept, the model is told
what was cut.

Prints come first and the error of a traceback comes last, so the middle goes. What is kept encodes
to at most the budget, counted by the model's tokenizer; the line that tells of the cut comes on
top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARS_PER_TOKEN = 16  # text of more characters a token of budget is cut before it is tokenized: prose has 4, code 3

_Span = tuple[int, int]  # characters [start, end) of one token


def cut_middle(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """``text`` with its middle cut so that at most ``max_tokens`` tokens of it are kept, and the
    number of tokens cut.

    That number is exact for a text of up to CHARS_PER_TOKEN characters a token of budget. A longer
    one is tokenized at both ends only, always cut, and the number is an estimate from them, which
    the model is told.
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


def _head(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest beginning that ends where a token ends and encodes to ``max_tokens`` at most, and
    its tokens.
    """
    for count in range(min(max_tokens, len(spans)), 0, -1):
        # # A character of several tokens has the same span in each of them: none of it is kept,
        # rather than a part.
        end = min(spans[count - 1][1], spans[count][0]) if count < len(spans) else len(text)
        head = text[:end]
        tokens = len(_spans(tokenizer, head))  # cut text may encode differently: a word's start, spaces before a word
        if tokens <= max_tokens:
            return head, tokens
    return "", 0


def _tail(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest end that starts where a token starts and encodes to ``max_tokens`` at most, and
    its tokens.
    """
    for count in range(min(max_tokens, len(spans)), 0, -1):
        start = max(spans[-count][0], spans[-count - 1][1]) if count < len(spans) else 0
        tail = text[start:]
        tokens = len(_spans(tokenizer, tail))
        if tokens <= max_tokens:
            return tail, tokens
    return "", 0


def _spans(tokenizer: PreTrainedTokenizerBase, text: str) -> list[_Span]:
    # # verbose=False: no warning that a text is longer than the model's context; it is about to be
    # cut.
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
