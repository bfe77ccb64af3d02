"""Cuts a tool's output to its token budget: keeps the head and tail and notes the cut between.

The middle is cut because printed values come first and a traceback's error comes last. The kept
text has at most ``max_tokens`` tokens of the model's tokenizer. The line that notes the cut is not
counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARS_PER_TOKEN = 16  # longer texts are cut before tokenization. Prose has about 4 characters per token, code 3

_KEPT_WINDOWS = 64  # how much of a huge text to keep before cleaning, in windows of CHARS_PER_TOKEN * max_tokens

_Span = tuple[int, int]  # characters [start, end) of one token


def cut_middle(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Cut the middle of ``text`` so that ``max_tokens`` tokens remain; also return the count cut.

    The count is exact if the text has at most CHARS_PER_TOKEN * max_tokens characters. A longer
    text is always cut, and only its two ends are tokenized. The count is then estimated from the
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
    """Drop the part of a huge text's middle that ``cut_middle`` never tokenizes.

    The rest is still longer than the window of ``cut_middle``, so it is cut with a note to the
    model. The count in that note does not include the tokens dropped here.
    """
    kept = _KEPT_WINDOWS * CHARS_PER_TOKEN * max_tokens
    return text if len(text) <= kept else text[: kept // 2] + text[-kept // 2 :]


def _head(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest prefix that ends at a token boundary and fits ``max_tokens``; its token count."""
    for count in range(min(max_tokens, len(spans)), 0, -1):
        # All tokens of a multi-token character have the same span: drop the whole character.
        end = min(spans[count - 1][1], spans[count][0]) if count < len(spans) else len(text)
        head = text[:end]
        tokens = len(_spans(tokenizer, head))  # cut text may tokenize differently: part of a word, spaces before a word
        if tokens <= max_tokens:
            return head, tokens
    return "", 0


def _tail(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[_Span], max_tokens: int) -> tuple[str, int]:
    """The longest suffix that starts at a token boundary and fits ``max_tokens``; its count."""
    for count in range(min(max_tokens, len(spans)), 0, -1):
        start = max(spans[-count][0], spans[-count - 1][1]) if count < len(spans) else 0
        tail = text[start:]
        tokens = len(_spans(tokenizer, tail))
        if tokens <= max_tokens:
            return tail, tokens
    return "", 0


def _spans(tokenizer: PreTrainedTokenizerBase, text: str) -> list[_Span]:
    # verbose=False: no warning about texts longer than the model's context, as they are cut here.
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
