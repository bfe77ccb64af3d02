r"""Finds the answer in a response: the last ``\boxed{...}`` or ``<answer>...</answer>``.

Only text that the model wrote after the last interpreter output counts. Calls and outputs do not
count, including outputs that the model invented, so a box printed by code earns nothing. The
renderer (``data.chat.neutralise``) prevents a real output from closing its own block.
"""

import re

OUTPUT_ENDS = ("</tool_response>", "</interpreter>")
# A tag in backticks is quoted and does not open or close a block: `<code>`.
_QUOTED = re.compile(r"`</?(?:tool_call|tool_response|code|interpreter)>`")
# A line of a Python session (>>>) with the output after it, up to an empty line.
_SESSION = re.compile(r"^[ \t]*>>>[^\n]*+(?:\n(?![ \t]*(?:\n|```|\Z))[^\n]*+)*+", re.MULTILINE)
# Blocks that are not answer text; a block without an end tag extends to the end of the text.
_TAG = re.compile(r"<(?P<end>/)?(?P<block>tool_call|tool_response|code|interpreter)>")
# Fenced code, and invented output of it, which models write when they have no tool. A box in either
# is not an answer.
_FENCED = re.compile(
    r"^[ \t]*```(?:python|python3|py|tool_code|code|output|tool_output|outputs|result|stdout|console|interpreter)\b"
    r".*?(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE,
)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"\\boxed\s*\{|\\boxed[ \t]*+-?\d++(?:[.,]\d++)*+|\\.|[{}]", re.DOTALL)


def extract_answer(response: str) -> str | None:
    """The answer in a response with its interpreter outputs, or None. Takes linear time."""
    return last_answer(model_text(response))


def model_text(response: str) -> str:
    """The text that the model wrote after the last interpreter output, without its calls.

    The response may be decoded with or without control tokens. A call or output block without an
    end tag is dropped, too.
    """
    response = _without_quoted_tags(response)
    start = max(response.rfind(end) + len(end) if end in response else 0 for end in OUTPUT_ENDS)
    return _outside_blocks(response[start:])


def _outside_blocks(text: str) -> str:
    """The text outside all blocks. A nested output belongs to the outer one.

    An output's end tag without a start tag discards the text before it, which may be output.
    """
    if "<" not in text and "```" not in text and ">>>" not in text:
        return text
    words: list[str] = []
    text = _without_quoted_tags(text)
    block, depth, start = "", 0, 0
    for tag in _TAG.finditer(text):
        name, ends = tag["block"], tag["end"] is not None
        if not depth:
            if ends and tag[0] in OUTPUT_ENDS:
                words.clear()
            else:
                words.append(text[start : tag.start()])
            block, depth, start = name, int(not ends), tag.end()
        elif name == block:
            depth += -1 if ends else int(block in ("tool_response", "interpreter"))
            start = tag.end()
    if not depth:
        words.append(text[start:])
    outside = " ".join(words)
    outside = _FENCED.sub(" ", outside) if "```" in outside else outside
    return _SESSION.sub(" ", outside) if ">>>" in outside else outside


def _without_quoted_tags(text: str) -> str:
    """The text without tags in backticks."""
    return _QUOTED.sub("` `", text) if "`<" in text else text


def last_answer(text: str) -> str | None:
    r"""The content of the last balanced ``\boxed{...}``, or of an ``<answer>`` block after it.

    Skips calls and outputs. Unlike ``model_text``, it keeps the text before them.
    """
    text = _outside_blocks(text)
    box = max(_boxes(text), key=lambda span: span[1], default=None)
    block = next(reversed(list(_ANSWER.finditer(text))), None) if "<answer>" in text else None
    if block is not None and (box is None or box[1] <= block.start()):
        return block[1].strip()
    return None if box is None else text[slice(*box)].strip()


def boxes(text: str) -> list[str]:
    r"""The contents of all balanced ``\boxed{...}`` in order; of nested ones only the outermost."""
    text = _outside_blocks(text)
    return [text[slice(*span)].strip() for span in _boxes(text)]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Start and end of each box's content, ordered by end."""
    found: list[tuple[int, int]] = []
    open_braces: list[int | None] = []  # start of a box's content, or None for any other brace
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()  # drop boxes inside this one
                found.append((start, match.start()))
        elif token.startswith("\\boxed") and not token.endswith("{"):
            start = match.start() + len("\\boxed")  # \boxed 34, which TeX accepts
            found.append((start + len(token[6:]) - len(token[6:].lstrip()), match.end()))
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return found
