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


def cut_middle(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Cut the middle of ``text`` so that ``max_tokens`` tokens remain; also return the count cut.

    The count is exact if the text has at most CHARS_PER_TOKEN * max_tokens characters. A longer
    text is always cut, and only its two ends are tokenized. The count is then estimated from the
    ends, and the note for the model has the word "about".
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
    head, tail, kept = "", "", 0
    for count in range(max_tokens, 0, -1):
        # Several tokens may share the span of one character, and the cut text may tokenize
        # differently, so count again.
        head = front[: front_spans[: (count + 1) // 2][-1][1]]
        tail = back[back_spans[-(count // 2) :][0][0] :] if count > 1 else ""
        kept = len(_spans(tokenizer, head)) + len(_spans(tokenizer, tail))
        if kept <= max_tokens:
            break
    else:
        head, tail, kept = "", "", 0
    if whole:
        cut_tokens, about = len(front_spans) - kept, ""
    else:
        tokens_per_char = (len(front_spans) + len(back_spans)) / (len(front) + len(back))
        cut_tokens, about = round((len(text) - len(head) - len(tail)) * tokens_per_char), "about "
    return f"{head}\n[... {about}{cut_tokens} tokens cut here ...]\n{tail}", cut_tokens


def _spans(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of each token."""
    # verbose=False: no warning about texts longer than the model's context, as they are cut here.
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
