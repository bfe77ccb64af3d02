r"""Compares parsed answers part by part. Two answers are unequal unless proved equal.

This runs in a checker process.
"""

# SymPy has no type hints, so its results are annotated here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
import re
from collections.abc import Callable
from functools import lru_cache
from math import gcd

import sympy
from sympy import Rational

from retool_mcore.reward.clean import split_unit, unit_ratio
from retool_mcore.reward.expression import MAX_LETTERS, Unreadable, value
from retool_mcore.reward.numbers import number, same_numbers
from retool_mcore.reward.parse import AnswerForm, parse
from retool_mcore.reward.real_sets import same_sets
from retool_mcore.reward.statement import choice, is_name, is_plain_name, quick_verdict, spelling, statement_of, words
from retool_mcore.reward.values import is_constant, proportional
from retool_mcore.reward.values import same as same_value

_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")


def equivalent(answer: str, truth: str) -> bool:
    """Whether an answer equals a truth, by ``quick_verdict`` or else by ``equal_by_value``."""
    known = quick_verdict(answer, truth)
    return equal_by_value(answer, truth) if known is None else known


@lru_cache(maxsize=4096)
def equal_by_value(answer: str, truth: str) -> bool:
    """Whether two answers that ``quick_verdict`` cannot decide are equal; False on an error."""
    (mine, label), (theirs, expected) = statement_of(answer), statement_of(truth)
    if label and expected and label != expected:
        return False
    try:
        return same(parse(mine), parse(theirs))
    except Exception:  # noqa: BLE001  SymPy raises anything on hostile input
        return False


def unreadable_reason(text: str) -> str:
    """Why a truth that is neither a number nor words cannot be parsed, or ""."""
    try:
        _check(parse(statement_of(text).text))
    except Unreadable as problem:
        return str(problem)
    return ""


def _check(form: AnswerForm) -> None:
    if form.kind == "value" and words(form.text) is None and choice(form.text) is None:
        for sign in "+-" if _PLUS_MINUS.search(form.text) else "+":
            value(split_unit(_signed(form.text, sign))[0])
    for at, part in enumerate(form.parts):
        if not (form.kind == "relation" and at == 0 and is_name(part.text)):
            _check(part)


def same(answer: AnswerForm, truth: AnswerForm) -> bool:
    if answer == truth:
        return True
    if (equal := same_sets(answer, truth)) is not None:
        return equal
    if answer.kind == "relation" or truth.kind == "relation":
        return _same_relations(answer, truth)
    names = _list_name(answer), _list_name(truth)
    if None not in names and names[0] != names[1]:
        return False
    answer, truth = _expand(answer), _expand(truth)
    kinds = {answer.kind, truth.kind}
    if kinds <= {"list", "set"} or (answer.text == "[]" and truth.kind in ("list", "set")):
        return _same_elements(answer, truth)
    if kinds == {"tuple", "matrix"}:  # a tuple and a row or column vector
        shape = (answer if answer.kind == "matrix" else truth).text
        return "1" in shape.split("x") and _same_parts(answer, truth)
    if kinds == {"value"}:
        return same_values(answer.text, truth.text)
    alike = answer.text == truth.text or (answer.text == "[]" and truth.text == "()" and len(truth.parts) != 2)
    return answer.kind == truth.kind and alike and _same_parts(answer, truth)


def _same_parts(answer: AnswerForm, truth: AnswerForm, alike: Callable[[AnswerForm, AnswerForm], bool] = same) -> bool:
    return len(answer.parts) == len(truth.parts) and all(map(alike, answer.parts, truth.parts))


def same_values(answer: str, truth: str) -> bool:
    """Whether two single values are equal, including units and percent signs."""
    if spelling(answer) == spelling(truth):
        return True
    if (known := same_numbers(answer, truth)) is not None:
        return known
    texts = [words(each) for each in (answer, truth)]
    if any(texts) and (all(texts) or max(map(len, filter(None, texts))) > MAX_LETTERS or "no" in texts):
        return texts[0] == texts[1]
    (mine, unit), (theirs, expected) = split_unit(answer), split_unit(truth)
    times = unit_ratio(unit, expected)
    if times is None:
        return False
    a, b = value(mine) * Rational(times.numerator, times.denominator), value(theirs)
    if same_value(a, b, mine, theirs):
        return True
    degree = sympy.pi / 180
    if (unit == "deg") != (expected == "deg"):
        return same_value(a * degree, b) if unit == "deg" else same_value(a, b * degree)
    return False


def _expand(form: AnswerForm) -> AnswerForm:
    r"""Expand ``1 \pm 2`` to a list, ``x = 1, x = 2`` to ``1, 2``, and ``\{5\}`` to 5."""
    if form.kind == "value" and _PLUS_MINUS.search(form.text):
        return AnswerForm("list", "", tuple(parse(_signed(form.text, sign)) for sign in "+-"))
    if form.kind in ("set", "tuple") and len(form.parts) == 1 and form.text != "()" and form.parts[0].kind == "value":
        return _expand(form.parts[0])
    if form.kind != "list":
        return form
    if _list_name(form):
        form = AnswerForm("list", "", tuple(part.parts[1] if part.kind == "relation" else part for part in form.parts))
    parts = [each for part in form.parts for each in _elements(part)]
    if (
        all(part.kind == "value" for part in parts)
        and len(parts) > 1
        and all(same(part, parts[0]) for part in parts[1:])
    ):
        return parts[0]  # such as "0.5 or 50%"
    return AnswerForm("list", "", tuple(parts))


def _list_name(form: AnswerForm) -> str | None:
    """The name in a list such as ``x = 1, x = 2`` or ``x = 1, 2``, or None."""
    if form.kind != "list":
        return None
    relations = [part for part in form.parts if part.kind == "relation"]
    names = {_name(part) for part in relations}
    plain = len(names) == 1 and all(part.text == "=" and len(part.parts) == 2 for part in relations)
    return names.pop() if plain and (len(relations) == len(form.parts) or form.parts[0] == relations[0]) else None


def _name(relation: AnswerForm) -> str:
    """The left side of an equation, without formatting."""
    return re.sub(r"\\(?:text|mathrm)(?![a-z])|[^A-Za-z\d()']", "", relation.parts[0].text)


def _elements(part: AnswerForm) -> tuple[AnswerForm, ...]:
    expanded = _expand(part) if part.kind == "value" else part
    return expanded.parts if expanded.kind == "list" else (part,)


def _signed(text: str, sign: str) -> str:
    other = "-" if sign == "+" else "+"
    return _PLUS_MINUS.sub(lambda match: sign if match[1] == "pm" else other, text)


def _same_elements(answer: AnswerForm, truth: AnswerForm) -> bool:
    """Whether two lists have the same elements in any order. A set ignores repetitions."""
    if _states_names(answer) != _states_names(truth):
        return False  # "x = 1, y = 2" is not "1, 2"
    if "set" in (answer.kind, truth.kind):
        return all(any(_provably_same(x, y) for y in truth.parts) for x in answer.parts) and all(
            any(_provably_same(x, y) for x in answer.parts) for y in truth.parts
        )
    if len(answer.parts) != len(truth.parts):
        return False
    left = list(truth.parts)
    for part in answer.parts:
        found = next((at for at, other in enumerate(left) if _provably_same(part, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _states_names(form: AnswerForm) -> bool:
    return any(part.kind == "relation" for part in form.parts)


def _provably_same(answer: AnswerForm, truth: AnswerForm) -> bool:
    try:
        return same(answer, truth)
    except Unreadable:
        return False


# Equations


def _same_relations(answer: AnswerForm, truth: AnswerForm) -> bool:
    """Compare two relations, or a relation with a value.

    Handles equations, inequalities, ratios, ``x = 5`` with ``5``, and chains of equal values.
    """
    alike = answer.kind == truth.kind == "relation" and answer.text == truth.text
    if alike and _same_parts(answer, truth, _provably_same):
        return True
    if truth.kind != "relation":
        return (stated := _stated(answer)) is not None and same(stated, truth)
    if set(truth.text.split()) == {":"}:
        return _same_ratio(answer, truth)
    expected = (
        _stated(truth)
        if truth.text == r"\in" or is_plain_name(truth.parts[0].text) or _is_constant(truth.parts[0])
        else None
    )
    if answer.kind != "relation":
        return expected is not None and same(answer, expected)
    if {answer.text, truth.text} != {"="}:
        return False
    mine, theirs = (value(form.parts[0].text) - value(form.parts[1].text) for form in (answer, truth))
    return proportional(mine, theirs)


def _stated(relation: AnswerForm) -> AnswerForm | None:
    r"""The value of a chain of equalities: 5 for ``x = 2 + 3 = 5``; None if one of them is false.

    A value after ``\approx`` is a decimal that may be off by one in its last digit.
    """
    signs = relation.text.split()
    if signs == [r"\in"]:
        return relation.parts[1] if is_name(relation.parts[0].text) else None
    if set(signs) - {"=", r"\approx"}:
        return None
    cut = signs.index(r"\approx") if r"\approx" in signs else len(signs)
    exact, rough = list(relation.parts[: cut + 1]), relation.parts[cut + 1 :]
    while len(exact) > 1 and not _provably_same(exact[0], exact[-1]):
        if not is_name(exact[0].text or "f") or _is_constant(exact[0]):
            return None
        exact = exact[1:]
    if len(exact) == 1 and is_name(exact[0].text) and len(rough) == 1 and not _is_constant(exact[0]):
        return rough[0]
    equal = all(_provably_same(each, exact[-1]) for each in exact[:-1])
    return exact[-1] if equal and all(_is_close(each, exact[-1]) for each in rough) else None


def _is_constant(form: AnswerForm) -> bool:
    try:
        return is_constant(value(form.text))
    except Unreadable:
        return False


def _is_close(decimal: AnswerForm, exact: AnswerForm) -> bool:
    text, unit = split_unit(decimal.text)
    stated_value, digits = number(text), len(text.partition(".")[2])
    try:
        true_value = value(split_unit(exact.text)[0]) * (100 if unit == "%" and not exact.text.endswith("%") else 1)
        return stated_value is not None and bool(
            abs(sympy.N(true_value, 30) - Rational(stated_value.numerator, stated_value.denominator))
            <= Rational(1, 10**digits)
        )
    except (Unreadable, TypeError):
        return False


def _same_ratio(answer: AnswerForm, truth: AnswerForm) -> bool:
    """Whether an answer equals a ratio: ``6:8`` and ``3/4`` equal the truth ``3:4``.

    A time of day equals only the same text.
    """
    texts = [part.text for part in (*answer.parts, *truth.parts)]
    if (
        any(len(text) > 1 and text.startswith("0") for text in texts)
        or gcd(*(int(part.text) for part in truth.parts if part.text.isdigit())) > 1
    ):
        return False
    expected = [value(part.text) for part in truth.parts]
    if answer.kind != "relation":
        return len(expected) == 2 and same_value(value(answer.text), expected[0] / expected[1])
    if answer.text != truth.text or len(answer.parts) != len(expected):
        return False
    stated = [value(part.text) for part in answer.parts]
    return all(same_value(x * expected[0], y * stated[0]) for x, y in zip(stated[1:], expected[1:], strict=True))
