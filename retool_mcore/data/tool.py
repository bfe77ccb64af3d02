"""The interpreter's tool schema, and the tags of calls in text.

A tag is only mentioned, not used, if it is in backticks or quotation marks, or if a pair of tags
contains only a few words. Inside a call nothing counts as a mention: the first end tag ends the
call, even within a string literal of its code. The rollout and `retool parse` use the same
functions, so the text that ends a turn is exactly the text parsed as a call.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOOL_NAME = "code_interpreter"
CODE_INTERPRETER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Runs Python code and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}

CALL_START, CALL_END = "<tool_call>", "</tool_call>"  # hermes: a JSON object between them
CODE_START, CODE_END = "<code>", "</code>"  # the paper's inline format: Python between them

_TICKS = re.compile(r"(?<!`)`{1,2}(?!`)")  # not three: within a code fence, a tag still counts as a call
_QUOTES = "\"'\u201c\u2018\u00ab"
_WORDS = re.compile(r"[^\S\n]*(?:[\w,.;:/-]+[^\S\n]*)*+")  # words on a single line
_BEFORE = re.compile(r"[\w\s,.;:/<>`'\"-]*")
_FEW_CHARS = 40  # longest text between or before tags that counts as "a few words"
_LINE_CHARS = 400  # how far to look back and ahead on the line of a tag


def tool_call(code: str) -> dict[str, Any]:
    """An interpreter call as an entry of a message's ``tool_calls``."""
    return {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"code": code}}}


@dataclass(frozen=True)
class TaggedText:
    """The text between a call's tags.

    ``start``: the opening tag, or None if it is missing. ``closed``: whether there is an end tag.
    ``alone``: the opening tag is the only text on its line, as in a call rather than a mention.
    """

    start: str | None
    body: str
    closed: bool
    alone: bool = False


def blocks(text: str, start: str, end: str) -> Iterator[TaggedText]:
    """Yield the blocks of a text in order, ignoring mentioned tags.

    A block's ``body`` starts after the first start tag that is not a mention. It may contain more
    start tags. A block without an end tag is the last one and contains the rest of the text.
    """
    tags = list(re.finditer(f"{re.escape(start)}|{re.escape(end)}", text))
    limits: list[int] = []  # per tag: where a rollout would cut the turn; later text has no effect
    limit = len(text)
    for tag in reversed(tags):
        limit = tag.end() if tag[0] == end else limit
        limits.append(limit)
    opened: int | None = None
    for tag, limit in zip(tags, reversed(limits), strict=True):
        if tag[0] == start:
            if opened is None and not _quoted(text, tag.start(), tag.end(), limit):
                opened = tag.end()
        elif opened is not None:
            if not _is_words(text, opened, tag.start()):
                yield TaggedText(start, text[opened : tag.start()], closed=True)
            opened = None
        elif not _quoted(text, tag.start(), tag.end(), limit) and not _follows_words(text, tag.start()):
            yield TaggedText(None, "", closed=True)
    if opened is not None:
        before = text[max(0, opened - len(start) - _LINE_CHARS) : opened - len(start)].rpartition("\n")[2]
        rest = text[opened : opened + _LINE_CHARS].partition("\n")
        yield TaggedText(
            start, text[opened:], closed=False, alone=not (before.strip() or rest[0].strip()) and bool(rest[1])
        )


def closes(text: str, start: str, end: str) -> bool:
    """Whether the last end tag of the text closes a block, rather than being a mention."""
    upto = text.rfind(end) + len(end)
    blocks_with_tag = list(blocks(text[:upto], start, end))
    blocks_before_tag = list(blocks(text[: upto - len(end)], start, end))
    return sum(block.closed for block in blocks_with_tag) > sum(block.closed for block in blocks_before_tag)


def without_mentions(text: str, start: str, end: str) -> str:
    """Replace mentioned tags with spaces in a text without calls.

    Keeps a start tag that is alone on its line, because it may start an unfinished call.
    """
    opens = re.escape(start)
    tags = re.compile(rf"^([^\S\n]*{opens}[^\S\n]*)$|{opens}|{re.escape(end)}", re.MULTILINE)
    return tags.sub(lambda tag: tag[0] if tag[1] else " ", text)


def _quoted(text: str, at: int, after: int, limit: int) -> bool:
    if len(_TICKS.findall(text[_line_start(text, at, _LINE_CHARS) : at])) % 2:
        # Inline code ends on its line. A turn may be cut at the tag, before the closing backtick.
        rest = text[after : min(limit, after + _LINE_CHARS)]
        rest, broken, _ = rest.partition("\n")
        return not broken or bool(_TICKS.search(rest))
    before, follows = text[max(0, at - 1) : at], text[after : min(limit, after + 1)]
    return bool(before) and before in _QUOTES and (not follows or follows in "\"'\u201d\u2019\u00bb")


def _is_words(text: str, at: int, upto: int) -> bool:
    return upto - at <= _FEW_CHARS and _WORDS.fullmatch(text, at, upto) is not None


def _follows_words(text: str, at: int) -> bool:
    line = _line_start(text, at, _FEW_CHARS)
    return bool(text[line:at].strip()) and _BEFORE.fullmatch(text, line, at) is not None


def _line_start(text: str, at: int, most: int) -> int:
    first = max(0, at - most)
    return max(first, text.rfind("\n", first, at) + 1)
