r"""Sentences that only say what the answer is: ``The solution set is (1, 3)``, ``Domain: x > 2``.

What they say stands alone then, and is read as if it had been written alone. A sentence that denies
or compares says no answer: ``the answer is not 5``, ``it is at most 5``. Takes linear time.
"""

from __future__ import annotations

import re

MAX_CHARS = 400  # of a sentence
_MAX_HEAD = 120  # of what stands before its verb
_VERB = re.compile(
    r"(?<![A-Za-z\\])(?:is|are|was|were|equals?|becomes|gives|(?:will|would|should|must|can only) be"
    r"|comes (?:out )?to|turns out to be|has|have|had|makes?|made|takes?|took|needs?|runs?|ran|earns?|costs?|pays?|paid"
    r"|spends?|spent|saves?|saved|sold|walk(?:s|ed)|gets?|got|weighs?|contains?|earned|bought|buys?|used?|uses|eats?|ate"
    r"|reads?|collect(?:s|ed)|receive[sd]|raise[sd]|score[sd]|drives?|drove|travels?|travell?ed|gave|gives?|owe[sd]?|keeps?"
    r"|kept|lost|wins?|won|sells?|produce[sd]|picks|picked|bakes|baked|remains?)(?![A-Za-z'’])"
    r"(?:\s{1,2}(?:equal to|given by|exactly|just|simply|therefore|thus|then|indeed|precisely|also|as follows|now"
    r"|the following|described by|(?:located )?at(?=\s?\$?(?:\(|\\left))))?\s{0,2}[:=]?"
)
_LABEL = re.compile(
    r"\A(?:\\text(?:bf|rm|it)?\s?\{\s?|\*\*)?((?:[A-Za-z]{2,20}\s){0,5}[A-Za-z]{3,20})(?:\s?\}|\*\*)?\s?[:=](?![:=])"
    r"\s?(?:\}|\*\*)?"
)
# What a label may name: anything else before a colon may be a part of the answer, as in "Bob: 3".
_NOUNS_SAID = (
    "answer answers ans solution solutions soln result results output domain range equation equations value values "
    "root roots total sum set interval intervals point points vertex area volume perimeter length probability "
    "maximum minimum max min expression formula function matrix ratio conclusion final inverse derivative "
    "coordinates zeros pairs triples center focus foci slope product difference quotient day line number count"
)
_NOUNS = frozenset(_NOUNS_SAID.split())
_DENYING_SAID = (
    "not no never none neither nor isn't cannot can't wrong incorrect false if when whenever unless until or than less "
    "more fewer least except without another other half twice double triple thrice either between about approximately "
    "there which what whether while although but where suppose assume let why how yes"
)
_DENYING = frozenset(_DENYING_SAID.split())
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]+")
_COMPARED = re.compile(r"[<>≤≥≠=≈:;!?]|\\(?:le|ge|lt|gt|ne|neq|leq|geq|approx|in|to)(?![a-z])|at most")
_MARKS = re.compile(r"\\(?:text|textbf|textrm|mathrm|textit)\s?\{|[{}$*]|\\[ ,;:()]|\\quad")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_OPENED = re.compile(r"\\(?:text|textbf|textrm|mathrm|textit)\s?\{[^{}]*$")
_NO_TAIL = re.compile(
    r"(?:not|no longer|about|either|neither|at (?:least|most)|less|more|greater|fewer|between|approximately|roughly"
    r"|around|nearly|almost|divisible|the same|never|one of|half|twice|double|in|of|to|true that"
    r"|(?:the )?(?:in)?correct|right|wrong)(?![A-Za-z])",
    re.IGNORECASE,
)
_BEING_SAID = "is are was were equal equals becomes gives will would should must can comes turns"
_OF_BEING = frozenset(_BEING_SAID.split())
_COUNT_TAIL = re.compile(r"(?:exactly )?(?:\d|\$|\\\(|no [a-z]|infinitely many)")
_MEASURED = re.compile(
    r"(?:an? |the )?(?:equation|area|volume|length|slope|value|perimeter|radius|diameter|center|vertex|measure)"
    r"(?: of| equal to| given by)?:?\s(?=[-\d$\\(xy])"
)
_IS_IT = re.compile(
    r"(?:\\text\s?\{\s{0,2}|(?<=\s))(?:is|are) (?:the |our |an? )?"
    r"(?:(?:final|correct|right|only|desired|required|unique|exact|general|real) ){0,2}"
    r"(?:answers?|solutions?(?: sets?)?|results?|roots?|values?|m(?:in|ax)imum|smallest|largest)\s?\.?\s?\}?\s?$"
)
_BEHIND = re.compile(
    r"(?:\\text\s?\{[\s,.]{0,3})?(?<![A-Za-z])"
    r"(?:as (?:desired|required|claimed|expected|needed)|QED|Q\.E\.D\.?)\.?\s?\}?$"
    r"|(?:\\text\s?\{)?\s?\((?:verified|checked|confirmed|computed)(?: [A-Za-z]{1,12}){0,4}\)\.?\s?\}?$"
    r"|(?<=[a-z\d]) (?:(?:is|are|were|will be) )?(?:left(?: over)?|remaining|in all|in total|altogether)"
    r"(?: (?:in|during|on|after|by|at|for) [A-Za-z ]{2,40})?\.?$"
    r"|\s#\s[A-Za-z][^#\n]{0,60}$"
)
_HAN = "\u4e00-\u9fff"
_CHINESE = re.compile(
    rf"\A(?:\\text\s?\{{\s?)?(?:(?![不非无没若当如除或错约至近])[{_HAN},A-Za-z$ (){{}}_]){{1,24}}"
    rf"(?:[是为:]|等于|有)[是为:]?"
    rf"\s?(?:\}}\s?)?(?=[^{_HAN}\s=是为:])"
)
_CHINESE_COUNT = re.compile(  # 还剩13个, 最小值-2
    rf"\A(?:(?![不非无没若当如除或错约至近])[{_HAN},]){{0,12}}"
    r"(?:剩下?|余下?|需要?|花了?|用了?|走了?|得到?|[大小数总]值)\s?(?=[-$\d])"
)
_SAYS = re.compile(rf"[{_HAN}]")
_SO = re.compile(
    r"(?:\\text\s?\{\s?)?(?:so|thus|hence|therefore|then|finally|consequently|in conclusion|it's"
    r"|altogether|in total|in all|overall|we (?:get|have|find|obtain))(?:,? that)?,?\s(?:\s?\})?",
    re.IGNORECASE,
)
_MAX_SUBJECT = 4  # words, of what is said in words
_WORDS_ALONE = re.compile(r"[A-Za-z '’-]{3,}\.?")
_ONE = r"(?:[IVX]{1,4}|\(?[A-J]\)?)"
_ONLY = re.compile(rf"only\s(?={_ONE}(?:(?:, and|,| and) {_ONE}){{0,5}}$)", re.IGNORECASE)
_TO_READ = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z]{2}|#|[\u0400-\u052f\u0900-\u0dff\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|\\text"
)  # words, no commands
_OTHER_LABEL = re.compile(r"[A-Za-z]{3}\s?\}?\s?[:=]")


def stated(text: str) -> str | None:
    """What a sentence says the answer is, or the text without what says that it is; else None."""
    if len(text) > MAX_CHARS or _TO_READ.search(text) is None:
        return None
    if (match := _BEHIND.search(text)) and match.start():
        return text[: match.start()]
    if " of the answer" in text:
        return None
    if (match := _IS_IT.search(text)) and match.start() and _says_no_more(text[: match.start()]):
        return text[: match.start()]
    if not text.isascii() and (match := _CHINESE.match(text)) and _SAYS.search(match[0]):
        return text[match.end() :]
    if not text.isascii() and (match := _CHINESE_COUNT.match(text)):
        return text[match.end() :]
    if (match := _SO.match(text)) and not _DENYING & _words(text[match.end() : match.end() + 12]):
        return text[match.end() :].lstrip("} ")
    if match := _ONLY.match(text):
        return text[match.end() :]
    match = _LABEL.match(text)
    if match and _is_label(match[1]) and not _OTHER_LABEL.search(text, match.end()):
        behind = text[match.end() :].strip()
        return (behind if behind.count("**") != 1 else behind.replace("**", "")) or None  # Answer: **72**
    return _behind_verb(text)


def _is_label(said: str) -> bool:
    words = said.casefold().split()
    return bool(_NOUNS & set(words)) and not _DENYING & set(words)


def _denies(words: set[str]) -> bool:
    return bool(_DENYING & words) or any(word.endswith("n't") for word in words)


def _words(text: str) -> set[str]:
    return {each.casefold().replace("’", "'") for each in _WORD.findall(text)}


def _says_no_more(text: str) -> bool:
    """Whether a text has no verb of its own, and denies nothing."""
    return _VERB.search(text) is None and not {"not", "no", "neither"} & _words(text)


def _behind_verb(text: str) -> str | None:
    for match in _VERB.finditer(text, 0, _MAX_HEAD):
        if (said := _said(text, match)) is not None:
            return said
        if match[0].split()[0] in _OF_BEING:
            break
    return None


def _said(text: str, match: re.Match[str]) -> str | None:
    head, tail = text[: match.start()], text[match.end() :].strip()
    if _OPENED.search(head):  # \text{The answer is } 5
        if "}" not in tail[:40]:
            return None
        words, _, rest = tail.partition("}")
        tail = f"{words.strip()} {rest.strip()}".strip() if not words.strip() else rf"\text{{{words}}}{rest}"
    tail = tail.lstrip(": ").strip()
    plain = _COMMANDS.sub(" ", _MARKS.sub(" ", head))
    words = _words(plain)
    verb = match[0].split()[0].rstrip(":=")
    if not tail or _COMPARED.search(head) or _denies(words) or _NO_TAIL.match(tail) or _VERB.search(tail):
        return None
    if _WORDS_ALONE.fullmatch(tail) and len(words) > _MAX_SUBJECT and "answer" not in words:
        return None  # a theorem, perhaps
    if verb in ("has", "have") and words and (measured := _MEASURED.match(tail)):
        return tail[measured.end() :]
    if verb not in _OF_BEING:
        return tail if words and _COUNT_TAIL.match(tail) else None
    if not words:
        name = "" if _WORDS_ALONE.fullmatch(tail) else head.replace("$", " ").strip()
        return f"{name} = {tail}" if name and len(name) < 20 else tail
    return tail
