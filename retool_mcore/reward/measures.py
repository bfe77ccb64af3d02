r"""Units that measure the same: ``50 mm`` is ``5 cm``, ``1 hour 30 minutes`` is ``90 minutes``."""

import re
from fractions import Fraction

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
