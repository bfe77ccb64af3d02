"""Units behind a value: which tokens are one, and when two units are the same."""

from __future__ import annotations

from retool_mcore.reward.tokens import UNITS, Token

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Units that are written as text or in roman type, where single letters are no names.
_MARKED = {
    "m": "meter", "meters": "meter", "s": "second", "g": "gram", "h": "hr", "in": "inch", "min": "minute", "L": "ml",
    "l": "liter", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "K": "kelvin", "C": "coulomb", "A": "ampere",
    "T": "tesla",
    "sec": "second", "cm": "cm", "nm": "nm",
} | UNITS  # fmt: skip
_MARKED["L"] = "liter"
VOWELS = set("aeiouy")
_GENERIC = {f"{base}^{power}" for base in ("unit", "times", "way", "point") for power in (1, 2, 3)}
_SEPARATORS = ("and", "or", "", ",")
_CLAUSES = (
    "or",
    "and",
    "so",
    "about",
    "if",
    "for",
    "when",
    "where",
    "with",
    "otherwise",
    "is",
    "are",
    "not",
    "all",
    "no",
    "mod",
    "to",
    "from",
)


def unit_at(tokens: list[Token], start: int) -> tuple[str | None, int]:
    """The unit that starts at a token and where it ends; None where none starts.

    It reads ``cm^2``, ``km / hour``, ``\\text{ m}``, ``\\mathrm{~kg} \\cdot \\mathrm{m}^2``.
    Of words that are no known unit the name is "?" and these words.
    """
    parts: list[str] = []
    position, joined = start, ""
    while position < len(tokens):
        named = _named(tokens, position)
        if named is None:
            break
        position += 1
        power, position = _power(tokens, position)
        parts.append(joined + named + power)
        joined, ahead = "", position
        if ahead < len(tokens) and tokens[ahead].kind in ("sign", "command") and tokens[ahead].text in ("/", "*", "."):
            joined = tokens[ahead].text.replace("*", "").replace(".", "")
            if _named(tokens, ahead + 1) is None:
                break
            position = ahead + 1
    if not parts:
        return None, start
    while position < len(tokens) and tokens[position].text == "." and position == len(tokens) - 1:
        position += 1
    unknown = [part[1:] for part in parts if part.startswith("?")]
    return ("?" + " ".join(unknown) if unknown else _joined(parts)), position


def same_unit(first: str, second: str) -> bool:
    """Whether two units may stand for one another: equal, or one of them missing or unknown.

    Of two unknown ones, "?red apple" and "?apple", one must hold all words of the other.
    """
    if first.startswith("?") and second.startswith("?"):
        mine, theirs = set(first[1:].split()), set(second[1:].split())
        return mine <= theirs or theirs <= mine
    return first == second or any(not each or each in _GENERIC or each.startswith("?") for each in (first, second))


def _named(tokens: list[Token], position: int) -> str | None:
    if position >= len(tokens):
        return None
    token = tokens[position]
    following = tokens[position + 1].text if position + 1 < len(tokens) else ""
    if token.kind == "word":
        lower = token.text.lower()
        if token.text in UNITS and lower not in SCALES:
            return UNITS[token.text]
        noun = len(lower) > 3 and not token.glued and VOWELS & set(lower) and lower not in (*SCALES, *_CLAUSES)
        return "?" + lower.removesuffix("s") if noun else None
    if token.kind == "command" and token.text in (r"\min", r"\sec") and position and following not in ("(", "{", "^"):
        return {r"\min": "minute", r"\sec": "second"}[token.text] if _ends(tokens, position + 1) else None
    if token.kind != "text" or token.text.lower().strip(" ,.") in _SEPARATORS:
        return None
    words = token.text.strip(" .").split()
    if (
        not words
        or any(word.lower().strip(",") in _CLAUSES for word in words)
        or any(c in token.text for c in "=<>\\$")
    ):
        return None
    known = [_known(word) for word in words]
    if None in known:
        return "?" + " ".join(word.lower().strip("().,").removesuffix("s") for word in words)
    return " ".join(word for word in known if word)


def _ends(tokens: list[Token], position: int) -> bool:
    return position >= len(tokens) or tokens[position].text in (",", ".", "/", r"\}", ")")


def _known(word: str) -> str | None:
    base, _, power = word.strip("().,").partition("^")
    parts = [_MARKED.get(part) for part in base.split("/")]
    if None in parts:
        return None
    return "/".join(part for part in parts if part) + (f"^{power}" if power else "")


def _power(tokens: list[Token], position: int) -> tuple[str, int]:
    if position + 1 >= len(tokens) or tokens[position].text != "^":
        return "", position
    found, end = "", position + 1
    braced = tokens[end].text == "{"
    end += braced
    while end < len(tokens) and (tokens[end].text in "+-" or tokens[end].text.isdigit()):
        found += tokens[end].text
        end += 1
        if not braced and found[-1].isdigit():
            break
    if braced:
        if end >= len(tokens) or tokens[end].text != "}":
            return "", position
        end += 1
    return (f"^{found}", end) if found.strip("+-") else ("", position)


def _joined(parts: list[str]) -> str:
    """One name of a unit: "square inch" is inch^2, "m / s" and "m s^-1" are one."""
    powers: dict[str, int] = {}
    factor, sign = 1, 1
    for word in " ".join(parts).replace("/", " / ").replace(" per ", " / ").split():
        if word in ("/", "per"):
            sign = -1
        elif word in ("square", "cubic"):
            factor = 2 if word == "square" else 3
        else:
            base, _, power = word.partition("^")
            digits = power.strip("{}").removeprefix("+")
            times = int(digits) if digits.removeprefix("-").isdigit() and len(digits) < 4 else 1
            powers[base] = powers.get(base, 0) + sign * factor * times
            factor, sign = 1, 1
    return " ".join(f"{base}^{power}" for base, power in sorted(powers.items()) if power)
