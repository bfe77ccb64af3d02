r"""Find the answer in a response: ``\boxed{...}`` or ``<answer>...</answer>``, the last one.

Only the model's own words after the last interpreter output count. Calls and outputs are left out,
the real ones and those that a model only pretends to have seen, so a box that code prints earns
nothing. The renderer (``data.chat.neutralise``) makes sure that a real output cannot close its own
block.
"""

import re

OUTPUT_ENDS = ("</tool_response>", "</interpreter>")
# A tag between backticks is only spoken of: `<code>`.
_QUOTED = re.compile(r"`</?(?:tool_call|tool_response|code|interpreter)>`")
# A line of an interpreter's session with what it printed, up to an empty line.
_SESSION = re.compile(r"^[ \t]*>>>[^\n]*+(?:\n(?![ \t]*(?:\n|```|\Z))[^\n]*+)*+", re.MULTILINE)
# Blocks that are not answer text; a block that the budget cut off extends to the end.
_TAG = re.compile(r"<(?P<end>/)?(?P<block>tool_call|tool_response|code|interpreter)>")
# Code in markdown, which models write without a tool, and what they then say that it printed; a box
# in either is no answer.
_FENCED = re.compile(
    r"^[ \t]*```(?:python|python3|py|tool_code|code|output|tool_output|outputs|result|stdout|console|interpreter)\b"
    r".*?(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE,
)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"\\boxed\s*\{|\\boxed[ \t]*+-?\d++(?:[.,]\d++)*+|\\.|[{}]", re.DOTALL)


def extract_answer(response: str) -> str | None:
    """The answer of a whole response with its interpreter outputs, or None. Takes linear time."""
    return last_answer(model_text(response))


def model_text(response: str) -> str:
    """What the model wrote after the last interpreter output, without its calls.

    The response may be decoded with or without control tokens. A call or output block without an
    end is left out too.
    """
    response = _spoken(response)
    start = max(response.rfind(end) + len(end) if end in response else 0 for end in OUTPUT_ENDS)
    return _own_words(response[start:])


def _own_words(text: str) -> str:
    """The text outside of all blocks. An output ends where all outputs in it have ended.

    What stands before the end of an output that has no beginning may be output: it is left out.
    """
    if "<" not in text and "```" not in text and ">>>" not in text:
        return text
    words: list[str] = []
    text = _spoken(text)
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
    said = " ".join(words)
    said = _FENCED.sub(" ", said) if "```" in said else said
    return _SESSION.sub(" ", said) if ">>>" in said else said


def _spoken(text: str) -> str:
    """The text without tags that are only spoken of."""
    return _QUOTED.sub("` `", text) if "`<" in text else text


def last_answer(text: str) -> str | None:
    r"""The content of the last balanced ``\boxed{...}``, or of an ``<answer>`` block after it.

    Calls and outputs in the text are passed over; ``model_text`` also passes over what stands
    before them.
    """
    text = _own_words(text)
    box = max(_boxes(text), key=lambda span: span[1], default=None)
    block = next(reversed(list(_ANSWER.finditer(text))), None) if "<answer>" in text else None
    if block is not None and (box is None or box[1] <= block.start()):
        return block[1].strip()
    return None if box is None else text[slice(*box)].strip()


def boxes(text: str) -> list[str]:
    r"""The contents of all balanced ``\boxed{...}``, in order; of nested ones the outermost."""
    text = _own_words(text)
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
        elif token.startswith("\\boxed") and not token.endswith("{"):
            start = match.start() + len("\\boxed")  # \boxed 34, as TeX takes it
            found.append((start + len(token[6:]) - len(token[6:].lstrip()), match.end()))
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return found
