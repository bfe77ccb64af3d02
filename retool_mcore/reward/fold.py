r"""Take off what only looks: invisible characters, full-width forms, sizes, colours and quotes.

It runs before anything else reads an answer, and takes linear time.
"""

import re
import unicodedata

from retool_mcore.reward.respell import lowered

_INVISIBLE = dict.fromkeys(
    [0xAD, 0x34F, 0x61C, 0x180E, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)]
)
_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {
    0x3000: " ", ord("、"): ",", ord("。"): ".", ord("．"): ".", ord("【"): "[", ord("】"): "]",
    ord("‘"): "'", ord("’"): "'", ord("“"): '"', ord("”"): '"', 0x2236: ":",
    **{0x24B6 + place: f"({chr(65 + place)})" for place in range(10)},  # Ⓐ
    0xFFE5: "¥", 0xFFE1: "£", 0xFFE6: "₩", ord("¢"): " cents", ord("￠"): " cents", ord("℃"): "°C", ord("℉"): "°F",
    ord("∛"): r"\sqrt[3]",
    ord("∜"): r"\sqrt[4]",
    **dict.fromkeys([*range(0x2000, 0x200B), 0x202F, 0x205F], " "),
    0xBA: "°", 0x2DA: "°", ord("Ø"): "∅", ord("∧"): r"\wedge ", ord("∨"): r"\vee ",
    ord("∴"): r"\therefore ", ord("➜"): r"\to ", ord("⇒"): r"\Rightarrow ", ord("⟹"): r"\Rightarrow ", ord("•"): " ",
    0x225C: "=", 0x2254: "=",
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in range(0x1D400, 0x1D800)},
}  # fmt: skip
_POWERS = str.maketrans("23", "²³")
# Units of one character, such as those of cm and of km²: the digit in the latter is raised.
_UNITS = {code: unicodedata.normalize("NFKC", chr(code)).translate(_POWERS) for code in range(0x3380, 0x33D8)}
_FOLDED = _INVISIBLE | _UNITS | _WIDE
_SMALL_FRACTION = re.compile("([⁰¹²³⁴-⁹]{1,9})[⁄∕/]([₀-₉]{1,9})")  # ³⁄₇
_DOTTED = re.compile("(\\d)\u0307")  # 0.3̇6̇: repeating digits
_BARRED = re.compile("(?:\\d\u0305){1,40}")  # 0.16̅
_RAISED_ROOT = re.compile(r"(?<![\w)}\]])([²³⁴-⁹])√")  # ⁴√8
_DEGREES = str.maketrans("²³⁴⁵⁶⁷⁸⁹", "23456789")
_BOLD_HAT = re.compile(r"\\(?:mathbf|boldsymbol|bm)\s?\{\s?(\\(?:hat|vec)\s?\{?\s?\\?[ijk](?:math)?\s?\}?)\s?\}")
_CHOICE = re.compile(r"^(\(?[A-J]\)?)：")
_ABOUT = re.compile(r" ~ (?=-?\d{0,9}\.\d)")  # \sqrt2 ~ 1.414
_ENDLESS = re.compile(r"(?<=\d)\.{3}|(?<=\+)\s?\.{3}(?=\s?\+)")
_SIZES = "tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
_STYLES = "displaystyle|textstyle|scriptstyle|scriptscriptstyle|bfseries|itshape|sffamily|ttfamily|rmfamily|strut|relax"
_LOOKS = re.compile(
    rf"\\(?:{_SIZES}|{_STYLES}|tt|sf|mathstrut|centering|noindent|[bB]igg?[lrm]?)(?![a-zA-Z])"
    r"|\\(?:(?:text)?color|colorbox|fcolorbox\{[^{}]{1,40}\})(?:\[[^][{}]{1,20}\])?\s*+\{[^{}]{1,40}\}"
    r"|\\math(?:open|close|inner)\s?\{\}|\\(?:math(?:ord|op|bin|rel|open|close|inner)|smash)(?=\s?\{)"
    r"|\\(?:tag|label)\*?\{[^{}]{1,20}\}|\\n(?:o|on)tag(?![a-z])"
    r"|\\[hv]space\*?\{[^{}]{1,20}\}|\\(?:hphantom|vphantom|phantom)\{[^{}]{0,40}\}"
)
_JOINER = re.compile(r"\\(?:text|mathrm|textrm)\s?\{\s{0,3}([或和且与及])\s{0,3}\}")
_LETTER_LABEL = re.compile(r"\\(?:text|mathrm|textbf|textit)\s?\{\s?([A-Za-z])\s?([:=])\s?\}")  # \text{x: }7
_LINE_WITHOUT = re.compile(r"(?:\AR|(?<=[= ])R|ℝ|\\mathbb\{R\}) \\ (?=[\[({\\])")  # R \ [-1, 1]
_AND_BEHIND = re.compile(r"(\\text\s?\{\s?[A-Za-z][A-Za-z ]{1,30}?) and ?\}")  # 12\text{ boys and }8
_CORNERS = str.maketrans("⎡⎢⎣⎤⎥⎦", "[[[]]]")
_QUOTES = ("'", '"', "`")
_FENCES = ("```", "'''", '"""')
_TAILS = (r"\checkmark", r"\blacksquare", r"\square", r"\Box", r"\hfill", r"\qed", "✓", "✔", "✅", "☑", "🎉", "∎",
          "■", "□", "<br>", "<br/>", "&nbsp;", r"\text{.}", r"\text{,}", r"\textbf{.}")  # fmt: skip
_TAGS = re.compile(r"</?(?:b|i|u|p|em|strong|span|answer)>")


def folded(text: str) -> str:
    r"""The text without invisible characters, sizes, colours; its wide forms as ASCII."""
    if not text.isascii():
        text = _CHOICE.sub(r"\1: ", text)
        text = _SMALL_FRACTION.sub(_in_full_size, text)
        text = lowered(_DOTTED.sub(r"\\dot{\1}", text.translate(_FOLDED)))
        text = _JOINER.sub(r"\1", text) if "}" in text else text
        text = _RAISED_ROOT.sub(lambda match: rf"\sqrt[{match[1].translate(_DEGREES)}]", text) if "√" in text else text
        text = _framed(text) if text.lstrip()[:1] == "⎡" else text
        text = _BARRED.sub(lambda match: rf"\overline{{{match[0].replace(chr(0x305), '')}}}", text)
    if " ~ " in text:
        text = _ABOUT.sub(r" \\approx ", text)
    if "..." in text:
        text = _ENDLESS.sub(r"\\ldots ", text)  # or it would go with a full stop
    text = untailed(text)
    if "\\hat" in text or "\\vec" in text:
        text = _BOLD_HAT.sub(r"\1", text)
    if " and}" in text or " and }" in text:
        text = _AND_BEHIND.sub(r"\1} \\text{ and }", text)
    if ":" in text or "=" in text:
        text = _LETTER_LABEL.sub(r"\1\2 ", text) if "\\text" in text or "\\math" in text else text
    if "R \\ " in text or "R} \\ " in text or "ℝ \\ " in text:
        text = _LINE_WITHOUT.sub(r"\\mathbb{R} \\setminus ", text)
    if "</" in text:
        text = _TAGS.sub("", text)
    return _LOOKS.sub(" ", text) if "\\" in text else text


def _in_full_size(match: re.Match[str]) -> str:
    over, under = (unicodedata.normalize("NFKC", each) for each in match.groups())
    return rf"\frac{{{over}}}{{{under}}}"


def untailed(text: str) -> str:
    """The text without signs of its end, such as a tick."""
    while (bare := text.rstrip()).endswith(_TAILS):
        text = next(bare.removesuffix(tail) for tail in _TAILS if bare.endswith(tail))
    return text


def _framed(text: str) -> str:
    """A matrix as SymPy draws it, in a frame of several lines."""
    rows = [line.strip() for line in text.strip().translate(_CORNERS).splitlines()]
    said = ["[" + ",".join(row[1:-1].split()) + "]" for row in rows if row[1:-1].strip()]
    return f"[{','.join(said)}]" if all(row[:1] == "[" and row[-1:] == "]" for row in rows) else text


def unquoted(text: str) -> str:
    """The text without one pair of quotes around all of it, as Python prints a string."""
    if len(text) > 2 and text.startswith("``") and text.endswith("''"):
        return text[2:-2].strip()
    if len(text) > 6 and text[:3] in _FENCES and text[:3] == text[-3:]:
        text = text[3:-3].strip()
    quoted = len(text) > 2 and text[0] in _QUOTES and text[0] == text[-1] and text[0] not in text[1:-1]
    return text[1:-1].strip() if quoted else text
