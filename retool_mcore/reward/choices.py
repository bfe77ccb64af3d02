"""Answers of multiple-choice questions: a letter, several, a letter with what it stands for.

``(B) 12`` is B and is 12. Letters of a choice are one in both cases: b is B.
"""

import re

_LABEL = re.compile(
    r"(?:\\(?:text|textbf|mathbf|mathrm|textrm|bf)\s*+\{\s*+(?=\(?[A-J][).:]\s*+\}))?"
    r"(?:\(([A-J])\)(?=\s|~|\\[ ,;:!q]|\}|[\d$]|\\(?:frac|sqrt))"
    r"|\(([a-e])\)(?=\s[\d$\\-][^()]{0,60}$)|([A-J])(?=\s\(-?\$?[\d./]{1,20}\)$)"
    r"|([A-J])(?:[.)]|:(?=\s)))\s*+(\})?(?:\s|~|\\[ ,;:!]|\\q?quad(?![a-z]))*+"
    r"(?!\([A-J]\)$)(?!(?:or|and)(?![a-z])|\\text\{\s*(?:or|and))(?=[^\s=^_!/*+)\]}<>,;.&|])"
)
_SEVERAL = re.compile(
    r"\(?[A-J]\)?(?:(?:\s|[,;&和与及]|and|\\text\{\s*(?:and)?,?\s*\}){1,4}\(?[A-J]\)?|\([A-J]\)){1,9}"
)
_CHINESE = re.compile(
    r"(?:故?应?选择?[::]?\s?|\[?答案\]?[为是]?[::]?\s?|选项)\s?\(?([A-J](?:[,和]?[A-J]){0,5})\)?|([A-J])\s?(?:选?项|是?正确|是正确的)"
)
_MARKED = re.compile(r"\\(?:text|textbf|mathbf|mathrm)\s?\{\s?(\(?[A-J]\)?)\s?\}")
_RUN = re.compile(r"[A-J]{2,10}")


_NUMERALS = re.compile(
    "[\u2460-\u2473](?:(?:\\s|[,;&和与及]|and|\\\\text\\{\\s*(?:and|和)\\s*\\}){0,4}[\u2460-\u2473]){1,9}"
)  # ①, ③ and ④
_SIGNS_BETWEEN = re.compile("[^\u2460-\u2473]")


def label(text: str) -> tuple[str, str]:
    """The letter in front of an answer and the answer behind it; ("", text) where there is none."""
    match = None if text[:5] == "D.N.E" else _LABEL.match(text)
    if match is None or (match[5] is not None) != text.startswith("\\"):
        return "", text
    return next(filter(None, match.groups()[:4])).upper(), text[match.end() :]


def bare_choice(text: str) -> str:
    """The letter of a choice with Chinese words or a list's brackets around it; else the text."""
    if len(text) == 3 and text[0] == "[" and text[2] == "]" and text[1] in "ABCDEFGHIJ":
        return text[1]
    if text[-2:] == "正确" and text[:1] in "①②③④⑤⑥⑦⑧⑨⑩":
        text = text[:-2]
    if len(text) < 100 and text[:1] in "①②③④⑤⑥⑦⑧⑨⑩" and _NUMERALS.fullmatch(text):
        return _SIGNS_BETWEEN.sub("", text)
    if text.isascii() or len(text) > 10 or (match := _CHINESE.fullmatch(text)) is None:
        return text
    return match[1] or match[2]


def lists_choices(text: str) -> bool:
    """Whether a text is several letters of choices with signs between them: ``A, C, D``."""
    return "," in text and len(text) < 60 and _SEVERAL.fullmatch(text) is not None


def same_choice(answer: str, truth: str) -> bool:
    """Whether two single letters, or groups of letters in any order, are the same choices.

    Letters without signs between them are choices where they stand in order. Behind a truth of
    three or more such letters an answer may have them in any order; of two it may not: BA is no AB.
    """
    if len(answer) == len(truth) == 1:
        return answer.isalpha() and answer.upper() == truth.upper()
    theirs = _letters(truth)
    if theirs is None:
        return False
    any_order = len(truth) > 2 and _RUN.fullmatch(truth) and _RUN.fullmatch(answer)
    return ("".join(sorted(answer)) if any_order else _letters(answer)) == theirs


def _letters(text: str) -> str | None:
    for opening, closing in ((r"\{", r"\}"), ("[", "]"), ("(", ")")):
        if opening == "(" and not _RUN.fullmatch(text[1:-1]):
            continue  # (A)(C)
        if text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    if _RUN.fullmatch(text) and list(text) == sorted(set(text)):
        return text
    if "\\" in text and len(text) < 200:
        text = _MARKED.sub(r"\1", text)
    if len(text) < 60 and _SEVERAL.fullmatch(text):
        found = sorted(re.sub("[^A-J]", "", text))
        return "".join(found) if len(set(found)) == len(found) else None
    return None
