r"""Find the answer in a response: ``\boxed{...}`` or ``<answer>...</answer>``, the last one.

Only the model's own words after the last interpreter output count. Calls and outputs are left out,
so printing a box from code earns nothing. The renderer (``data.chat.neutralise``) makes sure that
an output cannot close its own block.
"""

from __future__ import annotations

import re

OUTPUT_ENDS = ("</tool_response>", "</interpreter>")
# Blocks that are not answer text; a block that the budget cut off extends to the end.
_BLOCKS = re.compile(
    r"<(tool_call|tool_response|code|interpreter)>.*?(?:</\1>|\Z)",
    re.DOTALL,
)
# Code in markdown, which models write without a tool; a box in it is no answer either.
_FENCED_CODE = re.compile(r"^[ \t]*```(?:python|python3|py|tool_code)\b.*?(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def extract_answer(response: str) -> str | None:
    """The answer of a whole response with its interpreter outputs, or None. Takes linear time."""
    return last_answer(model_text(response))


def model_text(response: str) -> str:
    """What the model wrote after the last interpreter output, without its calls.

    The response may be decoded with or without control tokens. A call or output block without an
    end is left out too.
    """
    start = max(response.rfind(end) + len(end) if end in response else 0 for end in OUTPUT_ENDS)
    return _BLOCKS.sub(" ", response[start:])


def last_answer(text: str) -> str | None:
    r"""The content of the last balanced ``\boxed{...}``, or of an ``<answer>`` block after it."""
    text = _FENCED_CODE.sub(" ", text)
    box = max(_boxes(text), key=lambda span: span[1], default=None)
    block = next(reversed(list(_ANSWER.finditer(text))), None)
    if block is not None and (box is None or box[1] <= block.start()):
        return block[1].strip()
    return None if box is None else text[slice(*box)].strip()


def boxes(text: str) -> list[str]:
    r"""The contents of all balanced ``\boxed{...}``, in order; of nested ones the outermost."""
    text = _FENCED_CODE.sub(" ", text)
    return [text[slice(*span)].strip() for span in _boxes(text)]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Start and end of each box's content, ordered by end."""
    found: list[tuple[int, int]] = []
    open_braces: list[int | None] = []  # a box: where its content starts; any other brace: None
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
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return found
