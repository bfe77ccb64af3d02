r"""Intervals in words: ``from -2 to 7 inclusive``, ``all real numbers greater than 2``.

Which ends are in must be said: ``between 1 and 2`` alone is not read, nor are whole numbers from 1
to 5, which are a set.
"""

import re

MAX_CHARS = 160
_MARKS = re.compile(r"\\(?:text|textbf|textrm|mathrm)\s?\{([^{}]{0,80})\}|\\[ ,;:]|[$~]")
_END = (
    r"([-−+]?(?:\d{1,15}(?:\.\d{1,9})?|\\[dt]?frac ?\{?\d{1,9}\}? ?\{?\d{1,9}\}?|\d{0,9}(?:\\sqrt ?|√)\{?\d{1,9}\}?"
    r"|\d{0,9}(?:\\pi|pi|π)|\\infty|infinity|∞)(?:/\d{1,9})?)"
)
_IN, _OUT = "(?:inclusive(?:ly)?|included)", "(?:exclusive(?:ly)?|excluded|not included|not inclusive)"
_EACH = rf"(?: ?\(?({_IN}|{_OUT})\)?)?"
_WHOLE = (
    rf"(?:,? ?\(?(?:both )?(?:(?:ends?|endpoints?) )?(?:are )?({_IN}|{_OUT})\)?"
    r"|,? ?\(?(including|excluding|with|without) (?:both |the )?(?:ends|end ?points)\)?)?"
)
_HEAD = (
    r"(?:(?:all|any|every|each|the)(?: of the)? )?(?:set of )?(?:all )?"
    r"(?:reals?(?: numbers?)?|numbers?|values?(?: of)?)?"
    r" ?(?:[a-z](?: =| is| are| lies| must be| ranges?| can be)?)? ?(?:in the (?:interval|range) )?"
)
_SPAN = re.compile(
    rf"{_HEAD}(from|between|strictly between) {_END}{_EACH},? (?:to|and|through) {_END}{_WHOLE}\.?", re.IGNORECASE
)
_HALF_LINE = re.compile(
    r"(?:the set of )?(?:all |any |every |each )?(?:real )?"
    r"(?:(?:numbers?|reals?|values?(?: of)?)(?: [a-z])?|(?<=all )[a-z])"
    r" (?:(?:that|which) (?:are|is) )?(?:strictly )?"
    rf"(greater than or equal to|less than or equal to|at least|at most|greater than|less than|above|below) {_END}\.?",
    re.IGNORECASE,
)
_SIGNS = {"greater than or equal to": "[)", "at least": "[)", "greater than": "()", "above": "()",
          "less than or equal to": "(]", "at most": "(]", "less than": "()", "below": "()"}  # fmt: skip


def interval(text: str) -> str | None:
    """The interval that words say, with which of its ends are in; None for any other text."""
    if len(text) > MAX_CHARS:
        return None
    plain = " ".join(_MARKS.sub(lambda match: f" {match[1] or ''} ", text).replace(" ,", ",").split())
    plain = plain.replace(" ,", ",")
    if match := _HALF_LINE.fullmatch(plain):
        said = match[1].lower()
        opening, closing = _SIGNS[said]
        up = said in ("greater than or equal to", "at least", "greater than", "above")
        return f"{opening}{match[2]}, \\infty{closing}" if up else f"{opening}-\\infty, {match[2]}{closing}"
    match = _SPAN.fullmatch(plain)
    if match is None:
        return None
    strictly = match[1].lower().startswith("strictly")
    whole = (
        "excluded"
        if strictly
        else match[5]
        or {"including": "included", "with": "included"}.get((match[6] or "").lower(), match[6] and "excluded")
    )
    low, high = match[3] or whole, whole
    if not low or not high or (strictly and (match[3] or match[5])):
        return None
    ends = ["]" if re.fullmatch(_IN, each, re.IGNORECASE) else ")" for each in (low, high)]
    return f"{'[' if ends[0] == ']' else '('}{match[2].strip()}, {match[4].strip()}{ends[1]}"
