"""One spelling of each sign: what cannot be read is equal to the same text in other looks."""

import re

from retool_mcore.reward.tokens import Token, Unreadable, tokens

MAX_ANSWER_CHARS = 2000  # anything longer is no answer: it is wrong without a check
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}+")
_COLUMNS = re.compile(r"\\begin\{array\}\s*+\{[lcr| ]{1,30}\}")


def spelling(text: str) -> str:
    r"""The text with one spelling of each sign: no spaces, no ``\left``, no ``\dfrac``."""
    if len(text) > MAX_ANSWER_CHARS:
        return text
    try:
        found = tokens(_COLUMNS.sub(r"\\begin{array}", _prose(text)))
    except Unreadable:
        return text
    said: list[str] = []
    for index, each in enumerate(found):
        text = each.text.lower().replace(" ", "") if each.kind in ("text", "word") else each.text
        if text == "{" and each.kind == "sign" and index + 2 < len(found) and found[index + 2].text == "}":
            text = "" if _is_one_sign(found[index + 1]) else text
        elif text == "}" and each.kind == "sign" and index > 1 and found[index - 2].text == "{":
            text = "" if _is_one_sign(found[index - 1]) else text
        elif each.kind == "number" and index and found[index - 1].kind == "number":
            text = " " + text
        said.append(text[1:] if len(text) > 2 and text[0] == "\\" else text)  # \operatorname{span} and \text{span}
    return "".join(said)


def _is_one_sign(token: Token) -> bool:
    return len(token.text) == 1 or token.kind == "command"


def _prose(text: str) -> str:
    """A text with words without their case. Letters that stand alone are names and keep it."""
    words = _PROSE.findall(text)
    return _PROSE.sub(lambda match: match[0].lower(), text) if len(words) > 2 else text
