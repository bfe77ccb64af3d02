r"""A GSM8K solution as one program: each marked calculation is an assignment with its sentence.

An operand that equals an earlier step's value, and no number of the question, becomes that step's
name, and so do such numbers in the comments: the program states nothing that it is there to
compute.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Protocol

from retool_mcore.data.verify import Rejected

NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+")
MAX_COMMENT_CHARS = 160
MAX_POWER = 64
ROUNDED_DIGITS = 2  # of what division and decimals give: money, mostly

_RESULT = re.compile(r"\A\s*\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_EXPRESSION = re.compile(r"(?<![\w.])[-+*/x×÷=$().,%\d\s–]*=[\s$]*\Z")
_TWICE = re.compile(r"\b(\w+)( \1\b)+", re.IGNORECASE)
_MARK = re.compile(r"<<[^<>]*>>")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}
_ONES = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_WORDS = {word: value for value, word in enumerate(_ONES, 1)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}


class Marked(Protocol):
    """What of a step this module reads: the text before it, its expression and its value."""

    @property
    def text(self) -> str: ...
    @property
    def expression(self) -> str: ...
    @property
    def stated(self) -> Decimal: ...


def value_of(text: str) -> Fraction:
    """The value of a number as the texts write it."""
    return Fraction(text.replace(",", ""))


def numbers_of(text: str) -> set[Fraction]:
    """All numbers that a text states, in digits or in simple words."""
    words = re.findall(r"[a-z]+", text.lower())
    return {value_of(found) for found in NUMBER.findall(text)} | {
        Fraction(NUMBER_WORDS[w]) for w in words if w in NUMBER_WORDS
    }


def operands(expression: str) -> list[ast.Constant]:
    """The number literals of an expression."""
    return [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Constant)]


def literal(node: ast.Constant, expression: str) -> Fraction:
    """A literal's exact value, by its digits and not by the float nearest to it."""
    return Fraction((ast.get_source_segment(expression, node) or str(node.value)).replace("_", ""))


def evaluate(
    expression: str, names: Mapping[str, Fraction] | None = None, *, seen: list[Fraction] | None = None
) -> Fraction:
    """The exact value of an expression of numbers and ``names``; ``seen`` gets each part's value.

    Raises Rejected where there is none.
    """

    def at(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Expression):
            return at(node.body)
        if isinstance(node, ast.Constant):
            return literal(node, expression)
        if isinstance(node, ast.Name):
            return (names or {})[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            return -at(node.operand) if isinstance(node.op, ast.USub) else at(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = at(node.left), at(node.right)
            if isinstance(node.op, ast.Pow) and right.denominator == 1 and abs(right) <= MAX_POWER:
                value = Fraction(left**right)
            elif (operator := _OPERATORS.get(type(node.op))) is not None:
                value = operator(left, right)
            else:
                raise Rejected("calculation", f"{expression} has an operator that is not followed")
            if seen is not None:
                seen.append(value)
            return value
        raise Rejected("calculation", f"{expression} is more than arithmetic")

    try:
        return at(ast.parse(expression, mode="eval"))
    except (ZeroDivisionError, ValueError) as error:
        raise Rejected("calculation", f"{expression} has no value: {error}") from error


@dataclass(frozen=True)
class Assignment:
    """One assignment. ``linked``: the expression with names for earlier values."""

    name: str
    linked: str
    comment: str


@dataclass(frozen=True)
class Program:
    lines: tuple[Assignment, ...]

    @property
    def values(self) -> dict[str, Fraction]:
        """The exact value of each name."""
        names: dict[str, Fraction] = {}
        for line in self.lines:
            names[line.name] = evaluate(line.linked, names)
        return names

    @property
    def code(self) -> str:
        """The program. What division or decimals give is rounded where it is printed."""
        text = "".join(f"# {line.comment}\n{line.name} = {line.linked}\n" for line in self.lines)
        rounds = any("/" in line.linked or "." in line.linked for line in self.lines)
        last = self.lines[-1].name
        return f"{text}print({f'round({last}, {ROUNDED_DIGITS})' if rounds else last})"


def program_of(question: str, steps: Sequence[Marked], rest: str) -> Program:
    """The program of a solution. Raises Rejected where an operand could mean two steps."""
    given = numbers_of(question)
    lines: list[Assignment] = []
    stated = [Fraction(step.stated) for step in steps]
    for index, step in enumerate(steps):
        linked = link(step.expression, given, stated[:index])
        if not operands_joined(linked) and evaluate_constant(linked, given):
            raise Rejected("calculation", f"step {index + 1} states {linked} and calculates nothing")
        after = steps[index + 1].text if index + 1 < len(steps) else rest
        comment = _comment(step.text, after, given, stated[: index + 1])
        lines.append(Assignment(f"step{index + 1}", linked, comment))
    return Program(tuple(lines))


def operands_joined(expression: str) -> bool:
    """Whether an expression calculates: it has an operator of two sides."""
    return any(isinstance(node, ast.BinOp) for node in ast.walk(ast.parse(expression, mode="eval")))


def evaluate_constant(linked: str, given: set[Fraction]) -> bool:
    """Whether an expression without operators is a number that the question does not state."""
    found = operands(linked)
    return bool(found) and literal(found[0], linked) not in given


def link(expression: str, given: set[Fraction], earlier: Sequence[Fraction]) -> str:
    """The expression with ``stepN`` for each operand that can only be the value of step N."""
    out = expression
    for node in sorted(operands(expression), key=lambda node: -node.col_offset):
        value = literal(node, expression)
        holders = [index for index, each in enumerate(earlier) if each == value]
        if value in given or not holders:
            continue
        if len(holders) > 1:
            names = " or ".join(f"step{index + 1}" for index in holders)
            raise Rejected("calculation", f"{value} in {expression} may be {names}")
        assert node.end_col_offset is not None, "parsed from text"
        out = f"{out[: node.col_offset]}step{holders[0] + 1}{out[node.end_col_offset :]}"
    return out


def _comment(before: str, after: str, given: set[Fraction], values: Sequence[Fraction]) -> str:
    """The sentence around a calculation, without the calculation and what it gives."""
    head = _EXPRESSION.sub("", f" {before.rpartition(chr(10))[2]}")
    tail = _RESULT.sub("", after.partition("\n")[0])
    if "=" in tail or NUMBER.search(tail):
        tail = tail.partition(".")[0] if "=" not in tail else ""
    text = " ".join(f"{head.rstrip(' =$')} {tail}".split())

    def named(match: re.Match[str]) -> str:
        value = value_of(match[1])
        places = [index for index, each in enumerate(values) if each == value]
        return f"step{places[-1] + 1}" if places and value not in given else match[0]

    text = re.sub(rf"\$?({NUMBER.pattern})", named, text)
    text = _TWICE.sub(r"\1", text).replace(" .", ".").strip(" ,;")
    return text[:MAX_COMMENT_CHARS].strip() or f"step {len(values)}"


def plain_text(body: str) -> str:
    """A solution's sentences without its marks."""
    return _MARK.sub("", body).strip()
