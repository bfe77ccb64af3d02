"""Units behind a value: which tokens are one, which two are the same, and conversions."""

import re
from fractions import Fraction

from retool_mcore.reward.node import Term
from retool_mcore.reward.tokens import UNITS, Token

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
CHINESE_SCALES = {"万": 10**4, "亿": 10**8}
# Units that are written as text or in roman type, where single letters are no names.
_MARKED = {
    "m": "meter", "meters": "meter", "s": "second", "g": "gram", "h": "hr", "in": "inch", "min": "minute", "L": "ml",
    "l": "liter", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "K": "kelvin", "C": "coulomb", "A": "ampere",
    "T": "tesla", "yuan": "yuan",
    "sec": "second", "ms": "ms", "cm": "cm", "nm": "nm", "mi": "mile", "cc": "cm^3", "kph": "km/hr", "kmh": "km/hr",
} | UNITS  # fmt: skip
_MARKED["L"] = "liter"
_PLAIN_LETTERS = set("msghLNJWV")
VOWELS = set("aeiouy")
_GENERIC = {f"{base}^{power}" for base in ("unit", "times", "way", "point") for power in (1, 2, 3)}
_RAISED = {"squared": "^2", "cubed": "^3"}
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


# Words that change a value or deny it: what holds one of them is no unit.
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
_ONES = "zero one two three four five six seven eight nine eleven twelve thirteen fourteen fifteen sixteen nineteen"
_ORDINALS = (
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth "
    "eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths twentieth twentieths sixteenths hundredth "
    "hundredths thousandth thousandths millionth millionths"
)
_CHANGING = set(
    f"{_TENS} {_ONES} {_ORDINALS} hex squared cubed plus minus divided multiplied factorial choose modulo base power "
    "raised root doubled tripled halved halve double triple twice thrice reciprocal inverse inverted negative negated "
    "opposite repeating recurring binary octal decimal hexadecimal hundred thousand million billion trillion incorrect "
    "wrong false never none neither nor except without invalid impossible undefined infinite infinity unknown cannot "
    "approximately roughly almost nearly maybe perhaps possibly probably least most over under more less fewer than "
    "greater above below between only but else instead unless incorrectly correct right true equals equal then thus "
    "hence therefore answer guess error by prime primed complement transposed transpose excluded exclusive each score "
    "scores gross dozens quadrillion quintillion sextillion septillion octillion nonillion decillion lakh crore sine "
    "cosine tangent log logarithm bar dot overline modulus remainder off exactly zeroes nil null something tens ones "
    "hundreds thousands millions billions too much short docena docenas mil ciento cientos millón millones mitad medio "
    "tercio tercios cuartos douzaine douzaines mille millier milliers moitié tiers quarts dutzend tausend hundert "
    "approx hälfte drittel viertel millionen meio metade dúzia dúzias dozzina dozzine mila metà".split()
)
# One word that says what was done to a value, or which part of one is meant: reduced, thirtieths.
_DONE = re.compile(
    r"(?!(?:month|cloth|birth|death|length|width|depth|booth|moth|path|bath|growth|youth|earth|hundred|sled|shed)s?$)"
    r"(?:\w{3,20}[^e\W]ed|\w{1,20}(?:illion|[tdn]ieth|[^aeiou\W]th)s?)"
)
# What stands behind a value in Chinese: units by name, and words that count things.
_CHINESE = {"米": "meter", "厘米": "cm", "毫米": "mm", "分米": "dm", "千米": "km", "公里": "km", "克": "gram",
            "千克": "kg", "公斤": "kg", "毫克": "mg", "吨": "ton", "升": "liter", "毫升": "ml", "秒": "second",
            "分": "minute", "分钟": "minute", "时": "hr", "小时": "hr", "天": "day", "日": "day", "周": "week",
            "公顷": "hectare", "亩": "mu", "摄氏度": "degreeC", "斤": "jin", "角": "jiao", "里": "li",
            "月": "month", "个月": "month", "年": "year", "元": "yuan", "円": "yen", "度": "degree",
            "单位": "unit"}  # fmt: skip
_COUNTED = set(
    "个只条张人名本支把辆件种次台棵块页岁位步组盒箱袋瓶头匹朵颗根双对套户家间层站倍個枚匹冊杯隻張條頁塊顆歲號間層つ개명살"
)
_PRICED = frozenset(("dollar^1", "euro^1"))
_MANY = {"pair", "set", "group", "team", "box", "bag", "row", "half", "couple"}  # 15 pairs of students are 30
MAX_UNIT_TOKENS = 40  # of a unit in bare letters; kg m^{2} s^{-2} has 13
_NO_COUNT = re.compile("次方|平方|立方|[对错误真假根负正以上下左右内外前后间方率比例值]")  # 3 错误, 3 以上
_NO_NOUN = set("或和与不非至约多少半分零一二三四五六七八九十百千万亿倍余")  # what changes a count


# What a unit measures, and how many of the first one of its kind it is.
_SIZES: dict[str, tuple[str, Fraction]] = {
    unit: (kind, Fraction(size))
    for kind, units in {
        "length": {"meter": "1", "mm": "1/1000", "cm": "1/100", "dm": "1/10", "km": "1000", "nm": "1/1000000000",
                   "inch": "127/5000", "ft": "381/1250", "yd": "1143/1250", "mile": "201168/125"},
        "mass": {"gram": "1", "kg": "1000", "mg": "1/1000"},
        "weight": {"lb": "1", "oz": "1/16"},
        "time": {"second": "1", "ms": "1/1000", "minute": "60", "hr": "3600", "day": "86400", "week": "604800"},
        "money": {"dollar": "1", "cent": "1/100"},
        "energy": {"joule": "1", "kJ": "1000"},
    }.items()
    for unit, size in units.items()
}  # fmt: skip
_VOLUMES = {"liter": Fraction(1, 1000), "ml": Fraction(1, 10**6)}  # of cubic metres
_WRAPPED = re.compile(r"\\(?:text|mathrm|textrm|textbf)\s?\{([^{}]{0,60})\}|\\[ ,;:!]|~|\\quad")
_TWO = re.compile(r"\d[^\d+\-*/=^_()<>]{1,60}\d")  # two numbers with a word between them
_HOURS, _MINUTES, _SECONDS = r"(?:hours?|hrs?|h|个?小时)", r"(?:minutes?|mins?|分钟?)", r"(?:seconds?|secs?|秒)"
_AND = r"\.?\s{0,3}(?:,|and|,\s?and)?\s{0,3}"
_COMPOUNDS = tuple(
    (re.compile(rf"(\d{{1,6}})\s{{0,3}}{large}{_AND}(\d{{1,4}})\s{{0,3}}{small}\.?"), times, name)
    for large, small, times, name in (
        (_HOURS, _MINUTES, 60, "minutes"),
        ("h", "m", 60, "minutes"),
        ("['′]", "(?:\"|″|''|′′)", 12, "inches"),
        (_MINUTES, _SECONDS, 60, "seconds"),
        (r"(?:days?|天)", _HOURS, 24, "hours"),
        (r"(?:feet|foot|ft)", r"(?:inches|inch|in)", 12, "inches"),
        (r"(?:lbs?|pounds?)", r"(?:oz|ounces?)", 16, "ounces"),
        (r"dollars?", r"cents?", 100, "cents"),
        (r"(?:met(?:er|re)s?|m|米)", r"(?:centimet(?:er|re)s?|cm|厘米)", 100, "cm"),
        (r"(?:kilomet(?:er|re)s?|km|千米|公里)", r"(?:met(?:er|re)s?|m|米)", 1000, "m"),
        (r"(?:kilograms?|kg|千克|公斤)", r"(?:grams?|g|克)", 1000, "g"),
    )
)
_JOINED = re.compile(r"(?:\\cdot|·|⋅)\s?([A-Za-z])")  # km\\cdot h^{-1} in one text


def unit_at(tokens: list[Token], start: int) -> tuple[str | None, int]:
    """The unit that starts at a token and where it ends; None where none starts.

    It reads ``cm^2``, ``km / hour``, ``\\text{ m}``, ``\\mathrm{~kg} \\cdot \\mathrm{m}^2``.
    Of words that are no known unit the name is "?" and these words.
    """
    if (ratio := _ratio(tokens, start)) is not None:
        return ratio
    parts: list[str] = []
    position, joined = start, ""
    while position < len(tokens):
        named = _named(tokens, position)
        if named is None:
            break
        position += 1
        power, position = _power(tokens, position)
        if not power and not named.startswith("?") and position < len(tokens) and tokens[position].text in _RAISED:
            power, position = _RAISED[tokens[position].text], position + 1  # seconds squared
        parts.append(joined + named + power)
        joined, ahead = "", position
        if ahead < len(tokens) and tokens[ahead].kind in ("sign", "command") and _joins(tokens, ahead):
            joined = tokens[ahead].text.strip("*.-")
            if _named(tokens, ahead + 1) is None:
                break
            position = ahead + 1
    if not parts:
        return None, start
    while position < len(tokens) and tokens[position].text == "." and position == len(tokens) - 1:
        position += 1
    unknown = [part[1:] for part in parts if part.startswith("?")]
    return ("?" + " ".join(unknown) if unknown else _joined(parts)), position


def _joins(tokens: list[Token], at: int) -> bool:
    """Whether a sign joins two units; a hyphen does between two that are marked: ``N-m``."""
    if tokens[at].text != "-":
        return tokens[at].text in ("/", "*", ".")
    around = tokens[at - 1], tokens[at + 1] if at + 1 < len(tokens) else tokens[at]
    return all(each.kind == "text" and _known(each.text) is not None for each in around)


def per(unit: str) -> str:
    """One over a unit: ``lb^-1`` of ``lb^1``."""
    if unit.startswith("?"):
        return unit
    parts = [part.partition("^") for part in unit.split()]
    return " ".join(f"{base}^{-int(power)}" for base, _, power in parts)


def bare_unit(tokens: list[Token], unit: str) -> tuple[int, str] | None:
    """Where letters at the end spell a unit, and which: ``m`` in ``6 m``; None where they do not.

    ``unit``: the one that the other answer has. "" where it has none: then only letters that are
    hardly ever names behind a number and a space, such as ``m`` and ``m/s``, are a unit. They are
    also one beside a unit of their kind: ``7000 g`` beside kilograms.
    """
    spelt = [Token("text", each.text, each.glued) if each.text in _MARKED else each for each in tokens]
    for start in range(max(1, len(tokens) - MAX_UNIT_TOKENS), len(tokens)):
        if tokens[start].kind not in ("letter", "word", "text", "command"):
            continue
        marked = tokens[:start] + spelt[start:]
        named, end = unit_at(marked, start)
        if named is None or end != len(tokens) or named.startswith("?"):
            continue
        letters = [each.text for each in tokens[start:] if each.kind == "letter"]
        alone = not tokens[start].glued and set(letters) <= _PLAIN_LETTERS and len(letters) < 3
        if same_unit(named, unit) if unit else alone:
            return start, unit
        one = len(letters) == 1 and tokens[start - 1].kind == "number"  # 3500m beside kilometres
        if unit and (alone or one) and scale(named, unit) is not None:
            return start, named
    return None


def _ratio(tokens: list[Token], start: int) -> tuple[str, int] | None:
    """``\\frac{\\text{m}}{\\text{s}}`` behind a value: metres per second."""
    if start >= len(tokens) or tokens[start].text != r"\frac":
        return None
    names: list[str] = []
    at = start + 1
    for _ in range(2):
        if at >= len(tokens) or tokens[at].text != "{":
            return None
        named, end = unit_at(tokens, at + 1)
        if named is None or named.startswith("?") or end >= len(tokens) or tokens[end].text != "}":
            return None
        names.append(named)
        at = end + 1
    under = " ".join(f"/ {part}" for part in names[1].split())
    return _joined([names[0], under]), at


def temperature(node: Term, letter: str) -> Term | None:
    """``36^\\circ C`` and ``-5^\\circ C`` as such; None for anything else."""
    below = node.op == "neg" and node.args[0].op == "degree"
    if node.op != "degree" and not below:
        return None
    return Term("unit", (Term("neg", node.args[0].args),) if below else node.args, f"degree{letter}^1")


def same_unit(first: str, second: str) -> bool:
    """Whether two units may stand for one another: equal, or one of them missing or unknown.

    Of two unknown ones, "?red apple" and "?apple", one must hold all words of the other.
    """
    words = [set(each.removeprefix("?").split()) for each in (first, second)]
    if first and second and (words[0] ^ words[1]) & _MANY:
        return False
    if first.startswith("?") and second.startswith("?"):
        mine, theirs = words
        return mine <= theirs or theirs <= mine or first.isascii() != second.isascii()  # 苹果 and apples
    if any(" " in each and _PRICED.intersection(each.split()) for each in (first, second)):
        plain = [" ".join(part for part in each.split() if part not in _PRICED) for each in (first, second)]
        return plain[0] == plain[1] or not all((first, second))  # a sign of currency is dropped: $3 per pound
    if first == second or any(not each or each.startswith("?") for each in (first, second)):
        return True
    generic = [each for each in (first, second) if each in _GENERIC]
    if not generic or generic[0].endswith("^1"):
        return bool(generic) and (len(generic) == 1 or generic[1].endswith("^1"))
    return first[-2:] == second[-2:]  # square units may be cm^2, but neither cm nor cubic units


def _named(tokens: list[Token], position: int) -> str | None:
    if position >= len(tokens):
        return None
    token = tokens[position]
    following = tokens[position + 1].text if position + 1 < len(tokens) else ""
    if token.kind == "word":
        lower = token.text.lower()
        if token.text in UNITS and lower not in SCALES:
            return UNITS[token.text]
        changes = lower in SCALES or lower in _CLAUSES or _changes([lower])
        noun = (len(lower) > 3 or lower == "men") and not token.glued and VOWELS & set(lower) and not changes
        return "?" + lower.removesuffix("s") if noun else None
    if token.kind == "command" and token.text in (r"\min", r"\sec") and position and following not in ("(", "{", "^"):
        return {r"\min": "minute", r"\sec": "second"}[token.text] if _ends(tokens, position + 1) else None
    if token.kind == "letter" and token.text in _PLAIN_LETTERS and position > 1 and following in ("", "^", "."):
        over = tokens[position - 2]  # km/h
        return _MARKED[token.text] if tokens[position - 1].text == "/" and over.text in UNITS else None
    if token.kind != "text" or token.text.lower().strip(" ,.") in _SEPARATORS:
        return None
    if "\u4e00" <= token.text[0] <= "\u9fff":
        return _chinese(token.text)
    said = _JOINED.sub(r" \1", token.text)
    words = _raised(said.strip(" .").split())
    if (
        not words
        or _changes(words)
        or any(word.lower().strip(",()") in _CLAUSES for word in words)
        or any(c in said for c in "=<>\\$")
    ):
        return None
    known = [_known(word) for word in words]
    if None in known:
        return "?" + " ".join(word.lower().strip("().,").removesuffix("s") for word in words)
    return " ".join(word for word in known if word)


def _raised(words: list[str]) -> list[str]:
    """``cm squared`` as one word, ``cm^2``."""
    found: list[str] = []
    for word in words:
        if word in _RAISED and found and _known(found[-1]) and "^" not in found[-1]:
            found[-1] += _RAISED[word]
        else:
            found.append(word)
    return found


def _changes(words: list[str]) -> bool:
    """Whether words say more than a unit: numbers, a list, a word that changes the value."""
    plain = [word.lower().strip("().,;:!?") for word in words]
    if plain[0] == "more" and len(plain) > 1:  # 3 more apples, but not 3 or more
        plain = plain[1:]
    listed = any("," in word[:-1] or word in (",", ";") for word in words) or words[0][0] in ",;"
    numbers = any(any(map(str.isdigit, word)) and "^" not in word for word in plain)
    done = len(plain) == 1 and _DONE.fullmatch(plain[0]) is not None
    return listed or numbers or done or any(part in _CHANGING for word in plain for part in word.split("-"))


def _chinese(text: str) -> str | None:
    """A unit in Chinese, such as square metres or metres per second; None for any other text."""
    power = {"平方": "^2", "立方": "^3"}.get(text[:2], "")
    base = text[2:] if power else text
    if base in _CHINESE:
        return _CHINESE[base] + power
    over, per, under = base.replace("每", "/").partition("/")
    if per and over in _CHINESE and under in _CHINESE:
        return f"{_CHINESE[over]}/{_CHINESE[under]}"
    text = text.replace("不同的", "").replace("不同", "")  # 56种不同的方法
    if text and set(text) <= _COUNTED:
        return "unit"  # which counts anything
    if text in ("次方", "次幂", "平方", "立方"):
        return None  # 3次方, the third power
    noun = text[0] in _COUNTED or (len(text) > 1 and not _NO_COUNT.search(text))  # 3 苹果
    counted = noun and len(text) < 6 and not set(text) & _NO_NOUN
    return "?" + text if counted else None


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
    for word in (
        " ".join(parts)
        .replace("mph", "mile/hr")
        .replace("kph", "km/hr")
        .replace("/", " / ")
        .replace(" per ", " / ")
        .split()
    ):
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


def scale(first: str, second: str) -> Fraction | None:
    """How many of the second unit one of the first is; None where they measure different things."""
    if first == second or not first or not second:
        return None
    mine, theirs = _measured(first), _measured(second)
    return mine[1] / theirs[1] if mine and theirs and mine[0] == theirs[0] else None


def _measured(unit: str) -> tuple[dict[str, int], Fraction] | None:
    kinds: dict[str, int] = {}
    size = Fraction(1)
    for part in unit.split():
        base, _, power = part.partition("^")
        if not power.removeprefix("-").isdigit() or len(power) > 2:
            return None
        if base in _VOLUMES:
            kind, one, times = "length", _VOLUMES[base], 3
        elif base in _SIZES:
            (kind, one), times = _SIZES[base], 1
        else:
            return None
        kinds[kind] = kinds.get(kind, 0) + int(power) * times
        size *= one ** int(power)
    return kinds, size


def compound(text: str) -> str | None:
    """``1 hour 30 minutes`` in the smaller unit, ``90 minutes``; None for anything else."""
    if len(text) > 100 or _TWO.search(text) is None:
        return None
    plain = " ".join(_WRAPPED.sub(lambda match: f" {match[1] or ''} ", text).split())
    for form, times, small in _COMPOUNDS:
        if match := form.fullmatch(plain):
            if small == "cents" and len(match[2]) < 3:  # beside 12.50 it is dollars
                return rf"{int(match[1])}.{int(match[2]):02}\text{{ dollars}}"
            return rf"{int(match[1]) * times + int(match[2])}\text{{ {small}}}"
    return None
