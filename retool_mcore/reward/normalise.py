r"""Take off what surrounds an answer, and read what is left.

Delimiters, spacing, currency signs, separators of thousands and a full stop go; what stands there
is a plain number, mathematics (``reader``) or words. All of it takes linear time: it runs outside
of the checkers' limits.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from retool_mcore.reward.choices import bare_choice, label
from retool_mcore.reward.counts import chosen
from retool_mcore.reward.fold import folded, unquoted, untailed
from retool_mcore.reward.node import CUT_OFF, Term
from retool_mcore.reward.numerals import chinese, priced, spelt_out
from retool_mcore.reward.reader import read
from retool_mcore.reward.respell import bare_braces, respelled, trimmed
from retool_mcore.reward.sentences import stated
from retool_mcore.reward.spelling import MAX_ANSWER_CHARS, spelling
from retool_mcore.reward.spoken import PHRASES, SAYINGS, date_or_time, said_of
from retool_mcore.reward.tokens import GLUED, WORDS, Unreadable
from retool_mcore.reward.value import exact

MAX_EXACT_DIGITS = 2000
MAX_SENTENCES = 4  # one in another: so the answer is: the line y = x
MAX_WORDS = 6  # of a truth that is words
NO_ANSWERS = {"proof", "prove", "proved", "proven", "see", "answers", "null", "nan", "omitted", "notfound"}

_NUMBER = r"[-+]?(?:\d++\.?\d*+|\.\d++)"  # possessive: never split a thousand digits in a million ways
_SHORT = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?")  # what most answers are
_WRITTEN = re.compile(
    r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?[eE][-+]?[0-9]{1,3}|[-+]?[0-9]{1,18}/[0-9]{1,18}"
)  # 1e-7, 3/4
_BY_THOUSANDS = re.compile(r"[0-9]{1,3}(,|,\\! ?|\{,\}|\\,)[0-9]{3}(?:\1[0-9]{3}){0,9}")
_CHAINED = re.compile(  # 1 < x \leq 2
    r"(?:-?[0-9]{1,9}|[xyz])(?: ?(?:<|>|\\[lg]eq? |\\[lg]eq?(?=-?\d)) ?(?:-?[0-9]{1,9}|[xyz])){1,2}(?<=[\dxyz])"
)
# LaTeX that no stage before the reader changes: numbers, single letters, a few commands. No unit,
# degree, choice, date, base, count, interval or separator of thousands can be spelt so.
_LATEX = re.compile(
    r"\A(?=[^\\]*(?:\d|\\[a-z]|\\\{-?\d))(?=[^a-df-z(^\\]*[a-df-z(^\\])(?![{=*<])"
    r"(?:\d++(?![ \d_])|\.(?=\d)|(?<![A-Za-z])[a-ik-np-z](?![A-Za-z\d'])"
    r"|(?<=[a-z])_(?!\{1,)"
    r"|[+\-^()={}*|]|/(?!/)|(?<!\{),(?!\d{3})|(?<=[+\-=,*/]) | (?=[+\-=*/\\])|\\[{}]"
    r"|\\(?:frac|dfrac|tfrac|sqrt|pi|cdot|times|left(?=[(|])|right(?=[)|])|infty|pm|sin|cos|tan|ln|log|binom|cup"
    r"|theta|alpha|beta)(?![a-zA-Z]) ?){1,200}+(?<=[\w)}])",
    re.ASCII,
)
_PLAIN = re.compile(rf"({_NUMBER})(?:[eE]([-+]?\d{{1,3}}))?")
_FRACTION = re.compile(r"([-+]?\d{1,50})\s*+/\s*+(\d{1,50})")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})++(?![\d,])|[-+]?\d{1,3}(?: \d{3})++(?:\.\d++)?(?=$)")
_GROUPED = re.compile(r"(?<=\d)(?:,\\!|\\!,|\{,\}|\\,)\s?(?=\d{3}(?!\d))")
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|~|\\displaystyle(?![a-zA-Z])")
_CURRENCY = re.compile(r"\\\$|[$€£¥₹₩₽₫₺₱฿]|\\(?:euro|pounds)(?![a-zA-Z])")
_WRAPPED = re.compile(
    r"\\(?:boxed|mathbf|textbf|bold|mathrm|text|textrm|textit|mbox|boldsymbol|fbox|underline|emph"
    r"|textsf|texttt|mathsf|mathtt|textsc|ensuremath|num|framebox|mathit|mathnormal|bbox\[[^][{}]{1,30}\])\s*+\{"
)
_ONE_LINE = re.compile(  # of a display
    r"\\begin\{(align\*?|aligned|equation\*?|gather\*?|gathered|split|math|displaymath|center|flushleft)\}"
    r"((?:(?!\\begin|\\\\).){1,400}?)(?:\\\\\s*)?\\end\{\1\}",
    re.DOTALL,
)
_BARE_BOX = re.compile(r"\\boxed\s*+(-?\d++(?:[.,]\d++)*+)")
_SUPPOSES = frozenset("\\iIlLsStTaAmMpPgG")
_SUPPOSING = re.compile(  # not all are words to the reader: if x = 5 would be a product
    r"(?:\\text(?:bf|rm)?\s?\{\s?)?"
    r"(?:if|let|say|try|suppose|assum(?:e|ing)|maybe|perhaps|guess|possibly|probably)(?![A-Za-z])",
    re.IGNORECASE,
)
_MARKDOWN = re.compile(r"(\*\*|\*|__|_)(?=[^\s*_])([^*_]{1,200})(?<=\S)\1")  # bold and italic
_DOLLARS = re.compile(r"(?:US)?\\?\$(?:\s|\\,|\\ )?(?:[\d,]|\{,\}){0,40}(?:\.\d{1,10})?")
_BOLD_LABEL = re.compile(r"^\*\*([A-Za-z][A-Za-z ]{2,20}):?\*\*:?\s{0,3}(?=\S)")  # **Answer:** 34
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_LETTERS = re.compile(r"[A-Za-z][A-Za-z'’ .,\-&]*+")
_NAMED = re.compile(r"[A-Za-z]{3,}+[A-Za-z\d'’ .,:\-]*+")  # words with numbers: June 20
_RUN = re.compile(r"[A-Za-z]++")
_IT_IS = re.compile(r"^it(?:(?: is|['’]s) (?!not )(?=[a-z])| (?=cannot |can ?not |can't |depends |does not ))")
_ARTICLE = re.compile(r"^(?:an?|the) (?=[a-z]{3}\S*(?: \S+){0,2}$)")
_AND = re.compile(r",|&|(?<=[a-z.,] )and(?= [a-z])")  # Alice, Bob; Alice and Bob
MAX_NAME_CHARS = 60
_IN_BASE = re.compile(
    r"(?<![\w.])([\dA-F]{1,40})\)?(?:_\{|\s)?\s{0,2}(?:\\text\{)?\s{0,2}\(?(?:in\s)?base\s{0,2}\}?\s{0,2}(\d{1,2})\)?\}?\}?$"
)
_BASES = {"binary": 2, "octal": 8, "hexadecimal": 16, "hex": 16}
_NAMED_BASE = re.compile(r"\A([\dA-F]{1,40}) (?:in |\()(binary|octal|hexadecimal|hex)\)?$")
_ROUGHLY = re.compile(
    r"(?<=\S)(?:\\ |,)?\s?(?:\((?:\\approx|≈|about|approximately|approx\.?|\\text\{(?:approximately|approx\.?) \})"
    r"|(?:\\text\{)?\s?(?:,|or|\()?\s?(?:approximately|about)\s?\}?)\s{0,2}(-?[\d.]{1,40})\)?$"
)
_RATIO = r"-?(?:\d{1,9}\s?/\s?\d{1,9}|\\[dt]?frac\s?\{?\d{1,9}\}?\s?\{?\d{1,9}\}?)"
_FRACTION_DECIMAL = re.compile(  # 7/16 (0.4375) is one value said twice, not a product
    rf"({_RATIO})(?:\s|\\[ ,;]|~){{1,3}}\((-?\d{{0,9}}\.\d{{1,20}}|-?\d{{1,9}}(?:\.\d{{1,20}})?\\?%)\)"
)
_DECIMAL_FRACTION = re.compile(rf"(-?\d{{0,9}}\.\d{{1,20}})(?:\s|\\[ ,;]|~){{1,3}}\(({_RATIO})\)")
_QUOTIENT = re.compile(  # 17 R 3 is no product of three
    r"(\d{1,9})\s{0,3}(?:\\(?:text|mathrm)\s?\{\s{0,3})?(?:[Rr]\.?|remainder:?|余)(?:\s{0,3}\})?\s{0,3}(\d{1,9})"
)
_CUT_OFF = re.compile(  # \sqrt2 = 1.414...
    r"(?:=|\\approx|≈)\s?(-?\d{1,9}\.\d{2,40})\s?(?:\.{3}|\\(?:ldots|dots|cdots)(?![a-z]))$"
)
_DIGITS_OF = re.compile(r"(-?\d{1,9}\.\d{5,60})\s?\\(?:ldots|dots|cdots)")  # 0.6180339887...
_BEFORE = re.compile(r"^(?:\\text\{\s?)?(?:USD|RMB|CNY|EUR|GBP|INR|JPY|CAD|AUD|CHF|Rs\.?|US)\s{0,3}\}?\s{0,3}(?=\d)")
_PLUS_OR_MINUS = re.compile(r"^plus or minus\s{1,2}(?=\d|\\)", re.IGNORECASE)
_MINUS = re.compile(
    r"^(?:(?:negative|minus)\s{1,2}|\\text\{\s?(?:negative|minus)\s?\}\s{0,2})(?=[\d\\])", re.IGNORECASE
)
_PLAIN_NAME = re.compile(r"(?=[^A-Za-z]{0,60}[A-Za-z])[^\d=<>!,;]{1,60}")
_CHANCE = re.compile(
    r"(?:P|\\Pr|\\(?:mathbb|mathrm|operatorname)\{Pr?\})\s?(?:\\left\s?)?\([^()=]{1,30}=[^()=]{1,20}\)\s?"
)
_LIMIT = re.compile(r"\\(?:lim|i{0,2}int|sum|prod)(?![a-z])(?:_\{[^{}]{1,30}\}|[^<>!=]){1,60}")
_DENIES = re.compile(
    r"\\(?:ne|neq|le|ge|leq|geq|approx|not)(?![a-z])|\b(?:not|no|or|and|if|when|than|wrong|incorrect|except|for|where|let)\b|[+≠≤≥]"
)
_CHOICE = re.compile(
    r"\((?:\\(?:text|mathrm|textbf|mathbf)\{)?([A-Za-z])\}?\)|([A-Z])[.):]|([a-z])\)"
    r"|(?:[Tt]he )?(?:[Cc]orrect )?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)(?: is)?:?\s\(?([A-J]|(?<=\()[a-j](?=\)))\)?"
    r"|(?:[Tt]he )?(?:[Oo]ption|[Cc]hoice) ([a-j])"
    r"|(?:[Oo]ption |[Cc]hoice )?\(?([A-J])\)? is (?:the )?(?:correct|right)(?: (?:answer|option|choice|one))?"
)
_TEXT_DIGITS = re.compile(r"\\(?:text|texttt|mathrm|mathtt|mathbf)\{([\dA-F]{1,40})\}(?=_)")
_ONE_DIGIT = re.compile(r"\(?([A-F])\)?(_\{?(?:1[1-6]|\\text\{(?:sixteen|hex)\})\}?)")


_HAN_DIGITS = frozenset("零一二两三四五六七八九十百负")


class Normal(NamedTuple):
    """An answer without what surrounds it.

    ``number`` is its value if it is rational and ``percent`` says that a percent sign stood behind
    it; ``tree`` its reading as mathematics, ``words`` its words without case. Where all three are
    None, ``problem`` says why it cannot be read. ``label`` is the letter of a choice before it:
    ``(B) 12``.
    """

    text: str
    percent: bool = False
    number: Fraction | None = None
    tree: Term | None = None
    words: str | None = None
    problem: str = ""
    label: str = ""
    dollars: bool = False


@lru_cache(maxsize=4096)
def normalise(answer: str) -> Normal:
    """Bring an answer into normal form. It never fails, and takes linear time."""
    if _SHORT.fullmatch(plain := answer.strip()):
        return Normal(plain, number=Fraction(plain))
    if plain[:1].isdigit() and plain[-1:].isdigit():
        if _WRITTEN.fullmatch(plain) and (number := plain_number(plain)) is not None:
            return Normal(plain, number=number)
        if match := _BY_THOUSANDS.fullmatch(plain):
            digits = plain.replace(match[1], "")
            return Normal(digits, number=Fraction(digits))
    if _CHAINED.fullmatch(plain):
        return _expression(plain)
    if not plain.isdigit() and _LATEX.fullmatch(plain) and "==" not in plain and not _FRACTION.fullmatch(plain):
        return _expression(plain)
    return staged(answer)


def staged(answer: str) -> Normal:
    """``normalise`` by all of its stages: what it gives for plain LaTeX without them, too."""
    text = _unwrapped(folded(answer))
    for _ in range(MAX_SENTENCES):
        if (said := stated(text)) is None:
            break
        text = _unwrapped(said)
    if _DOLLARS.fullmatch(text):
        return _read(_joined(text))._replace(dollars=True)
    text = text if text.isascii() else priced(text)
    text = bare_choice(_joined(text).rstrip(".,; "))
    letter, rest = label(text)
    return _read(_joined(_unwrapped(rest)).rstrip(".,; "))._replace(label=letter) if letter else _read(text)


def _read(text: str) -> Normal:
    number = plain_number(text)
    if number is not None:
        return Normal(text, number=number)
    if text[1:2].isalpha() or text[:2] == "a " or text[:1] in _HAN_DIGITS:
        said = spelt_out(text) if text.isascii() else chinese(text)
        if said is not None and (number := plain_number(said)) is not None:
            return Normal(said, number=number)
        text = said or text
    text = _plainer(text)
    if "_" in text:
        text = _TEXT_DIGITS.sub(r"\1", text)
        text = f"0{match[1]}{match[2]}" if (match := _ONE_DIGIT.fullmatch(text)) else text  # E_{16}
    if not text:
        return Normal("", problem="it is empty")
    if (date := date_or_time(text)) is not None:
        hours = date.endswith("m") and ":" not in text  # 9 am is 9 beside a number
        return _expression(text)._replace(words=date) if hours else Normal(text, words=date)
    if (words := _words(text)) is not None:
        meant, words = said_of(words)
        return Normal(text, tree=read(meant) if meant else None, words=words)
    return _expression(text)


def _expression(text: str) -> Normal:
    if len(text) > MAX_ANSWER_CHARS:
        return Normal(text, problem=f"it has {len(text)} characters; {MAX_ANSWER_CHARS} are the most")
    if text[:1] in _SUPPOSES and _SUPPOSING.match(text):
        return Normal(text, problem="it only supposes an answer")
    cut_off = _DIGITS_OF.fullmatch(text) if "dots" in text else None
    try:
        tree = read(cut_off[1] if cut_off else text)
    except Unreadable as problem:
        if (tree := _named_by_text(text)) is not None:
            return Normal(text, False, None, tree)
        words = " ".join(text.casefold().replace(",", " , ").split()) if _NAMED.fullmatch(text) else None
        return Normal(text, words=words, problem=str(problem))
    if cut_off:
        return Normal(text, tree=Term("relation", (CUT_OFF, tree), r"\approx"))
    percent = tree.op == "percent"
    return Normal(text, percent, exact(tree.args[0] if percent else tree), tree)


def _plainer(text: str) -> str:
    """The text with what stands around numbers as mathematics: ``1011 (base 2)``, ``USD 5``."""
    if "base" in text:
        text = _IN_BASE.sub(r"\1_{\2}", text)
    if "in" in text or "hex" in text or "octal" in text:
        text = _NAMED_BASE.sub(lambda match: f"{match[1]}_{{{_BASES[match[2]]}}}", text)
    if "..." in text or "dots" in text:
        text = _CUT_OFF.sub(r"\\approx \1", text)
    if "approx" in text or "about" in text or ("≈" in text and text[-1] == ")"):
        text = _ROUGHLY.sub(r"\\approx \1", text)
    if text[:1].isdigit() and text[-1:].isdigit() and (match := _QUOTIENT.fullmatch(text)):
        return rf"{match[1]}\text{{ remainder }}{match[2]}"
    if text[-1:] == ")":
        text = _DECIMAL_FRACTION.sub(r"\2 \\approx \1", _FRACTION_DECIMAL.sub(r"\1 \\approx \2", text))
    if "C" in text or "P" in text or "A" in text:
        text = chosen(text)
    bare = _BEFORE.sub("", text)
    bare = bare if bare == text else _joined(bare)
    if (bare[:1] in "mMnNpP" and bare[1:2].isalpha()) or bare[:7] in ("\\text{n", "\\text{m"):
        bare = _MINUS.sub("-", _PLUS_OR_MINUS.sub(r"\\pm ", bare))
    return respelled(bare)


def _named_by_text(text: str) -> Term | None:
    """``P(A|B) = 0.25`` as what a name says: before "=" there is no number, and nothing denies."""
    head, _, tail = text.rpartition("=")
    named = _PLAIN_NAME.fullmatch(head) or _CHANCE.fullmatch(head) or (head.startswith("\\") and _LIMIT.fullmatch(head))
    if not head or len(head) > MAX_NAME_CHARS or not named or _DENIES.search(head):
        return None
    try:
        value = read(tail)
    except Unreadable:
        return None
    if value.op == "list" and any(each.op == "relation" for each in value.args):
        return None  # A. Alice B. n = 2^k, k \ge 0
    if value.op == "relation":  # boys : girls = 3 : 2
        return value if set(value.text.split()) == {":"} and head.count(":") == len(value.args) - 1 else None
    return Term("relation", (Term("name", text=spelling(head.replace("$", " ")).casefold()), value), "=")


@lru_cache(maxsize=4096)
def vote(answer: str | None) -> str:
    r"""The answer as maj@k counts it; "" for no answer.

    "034", "34" and "$34$" are one vote, and so are ``\frac{1}{2}``, ``\dfrac12``, 1/2 and 0.5.
    """
    if answer is None:
        return ""
    normal = normalise(answer)
    if normal.number is not None:
        return str(normal.number) + ("%" if normal.percent else "")
    return normal.words if normal.words is not None else spelling(normal.text)


def judgeable(truth: str) -> str | None:
    """Why answers cannot be judged against the truth of a data row; None where they can.

    A truth can be judged when it is read as a number, as mathematics or as a few words.
    """
    normal = normalise(truth)
    if normal.number is None and normal.tree is None and normal.words is None:
        return normal.problem
    if normal.words is None or normal.number is not None or normal.tree is not None:
        return None
    words = normal.words.split()
    if len(words) > MAX_WORDS:
        return f"it is a text of {len(words)} words, and only the same words would equal it"
    if words[0] in NO_ANSWERS:
        return f"{truth.strip()!r} is no answer"
    return None


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal or fraction of integers.

    None for anything else, and for absurdly long numbers.
    """
    if len(text) > MAX_EXACT_DIGITS:
        text = text.lstrip("0") if text.isdigit() else text
    if len(text) > MAX_EXACT_DIGITS:
        return None
    if match := _PLAIN.fullmatch(text):
        return Fraction(match[1].rstrip(".")) * Fraction(10) ** int(match[2] or 0)
    if (match := _FRACTION.fullmatch(text)) and int(match[2]):
        return Fraction(int(match[1]), int(match[2]))
    return None


def equal_numbers(answer: Normal, truth: Normal) -> bool:
    """Exact equality, with a choice for a percent sign on one side only.

    The sign may be a unit (50% is 50) or mean a hundredth (50% is 0.5).
    """
    if answer.number is None or truth.number is None:
        return False
    if answer.number == truth.number:
        return True
    if answer.percent == truth.percent:
        return False
    return answer.number == (truth.number / 100 if truth.percent else truth.number * 100)


def _unwrapped(text: str) -> str:
    """Without delimiters, boxes, text commands around all of it, and a full stop behind it."""
    while True:
        before, text = text, trimmed(unquoted(untailed(text.strip(" ~\n\t\r"))).rstrip(",;.").rstrip())
        if text.endswith("\\"):
            text = text.rstrip("\\ ")  # a new line, or half of a "\\ "
        for opening, closing in _DELIMITERS if text[:1] in ("$", "\\") else ():
            inside = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
            if inside and opening not in text[len(opening) : -len(closing)]:
                text = text[len(opening) : -len(closing)].strip()
        if text[:1] == "\\":
            if text[:7] == r"\begin{" and (match := _ONE_LINE.fullmatch(text)):
                text = match[2].replace("&", "").strip()
            if (match := _WRAPPED.match(text)) and _closes_at_end(text, match.end()):
                text = text[match.end() : -1].strip()
            elif match := _BARE_BOX.fullmatch(text):
                text = match[1]
        if text[:1] == "{" and _closes_at_end(text, 1):
            text = bare_braces(text[1:-1].strip())
        if text[:2] == "**" == text[-2:] and "**" not in text[2:-2]:
            text = text[2:-2].strip()
        if text[:1] in ("*", "_"):
            if (match := _MARKDOWN.fullmatch(text)) is not None:
                text = match[2].strip()
            text = _BOLD_LABEL.sub(r"\1: ", text)
        if text == before or len(before) > MAX_ANSWER_CHARS:
            return text


def _closes_at_end(text: str, start: int) -> bool:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position == len(text) - 1
    return False


def _joined(text: str) -> str:
    """Without spacing commands, currency signs and separators of thousands."""
    if "," in text:
        text = _GROUPED.sub("", text)
    if "\\" in text or "~" in text:
        text = _SPACING.sub(_space, text)
    if not text.isascii():
        text = text.replace("−", "-").replace("\u00a0", " ")
    if "$" in text or not text.isascii() or r"\euro" in text or r"\pounds" in text:
        text = _CURRENCY.sub("", text)
    text = text.replace("{,}", ",").strip()
    start = text.rfind("=") + 1
    start += len(text[start:]) - len(text[start:].lstrip())
    if (match := _THOUSANDS.match(text, start)) and "," not in text[match.end() :]:
        text = text[:start] + match[0].replace(",", "").replace(" ", "") + text[match.end() :]
    return text


def _space(match: re.Match[str]) -> str:
    return "" if match[0] in ("\\!", "\\displaystyle") else " "


def _words(text: str) -> str | None:
    """An answer that is words or the letter of a choice, without case; None for mathematics."""
    if match := _CHOICE.fullmatch(text):
        return next(filter(None, match.groups())).upper()
    if len(text) == 1 and text in "ABCDE":
        return text
    if text in ("D.N.E", "D. N. E"):
        return "dne"
    text = text[:-1] if text[-1] == "!" and (len(text) > 5 or text[:-1].lower() in ("yes", "no", "true")) else text
    if not _LETTERS.fullmatch(text):
        return text if text in PHRASES or text in SAYINGS else None
    if text.lower() in ("no", "ok"):
        return text.lower()
    runs = _RUN.findall(text)
    if "and" in runs and all(run == "and" or (len(run) == 1 and run.islower()) for run in runs):
        return None  # i and -i
    if not any(len(run) > 2 or (len(run) == 2 and run[0].isupper()) for run in runs):
        return None
    if any(run in WORDS or GLUED.fullmatch(run) for run in runs) and text.casefold() not in PHRASES:
        return None
    plain = _AND.sub(" ", text.casefold()).replace(".", "")
    return _ARTICLE.sub("", _IT_IS.sub("", " ".join(plain.split())))
