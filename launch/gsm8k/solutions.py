r"""Parses GSM8K's solutions, evaluates them exactly, and rewrites them as programs.

A solution marks its calculations: ``48/2 = <<48/2=24>>24 clips``. In a program, each calculation is
an assignment with its sentence as a comment. If an operand equals an earlier step's value but no
number in the question, the program uses the step's name instead, also in comments. So the program
contains no number that it should compute.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from retool_mcore.data.verify import Rejected

NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+")
MAX_COMMENT_CHARS = 160
MAX_POWER = 64
ROUNDED_DIGITS = 2  # of results of divisions and decimals, which are mostly money

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_RESULT = re.compile(r"\A\s*\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_EXPRESSION = re.compile(r"(?<![\w.])[-+*/x×÷=$().,%\d\s–]*=[\s$]*\Z")
_TWICE = re.compile(r"\b(\w+)( \1\b)+", re.IGNORECASE)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
}
_ONES = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: Fraction(value) for value, word in enumerate(_ONES.split(), 1)}
NUMBER_WORDS |= {word: Fraction(10 * tens) for tens, word in enumerate(_TENS.split(), 2)}


@dataclass(frozen=True)
class Step:
    """A calculation: the text before it, its expression, and the value that the solution states."""

    text: str
    expression: str
    stated: Decimal


@dataclass(frozen=True)
class Solution:
    steps: tuple[Step, ...]
    rest: str  # the text after the last calculation, without the answer line
    truth: str
    body: str  # the whole text with its marks, without the answer line

    @property
    def text(self) -> str:
        """The text without the marks."""
        return re.sub(r"<<[^<>]*>>", "", self.body).strip()


def parse(answer: str) -> Solution:
    """Split a solution at its calculations. Raises Rejected."""
    body, sign, truth = answer.rpartition("####")
    if not sign or not truth.strip():
        raise Rejected("source", "no answer line '#### ...'")
    steps, start = list[Step](), 0
    for match in _MARK.finditer(body):
        try:
            stated = Decimal(match[2].replace(",", "").strip())
        except InvalidOperation as error:
            raise Rejected("source", f"the stated value {match[2]!r} is not a number") from error
        steps.append(Step(body[start : match.start()].strip(), _arithmetic(match[1]), stated))
        start = match.end()
    if not steps:
        raise Rejected("source", "no calculation is marked")
    rest = body[start:].strip()
    if any("<<" in text for text in (*(step.text for step in steps), rest)):
        raise Rejected("source", "a calculation mark is incomplete")
    return Solution(tuple(steps), rest, truth.strip().replace(",", ""), body)


def _arithmetic(expression: str) -> str:
    """Check that an expression is arithmetic on numbers, and return it as Python source code."""
    text = _LEADING_ZEROS.sub("", expression.strip())
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise Rejected("source", f"{expression!r} is not an expression") from error
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise Rejected("source", f"{expression!r} is not only arithmetic")
    return text


def value_of(text: str) -> Fraction:
    """The value of a number in a text, such as 1,234."""
    return Fraction(text.replace(",", ""))


def word_values(text: str) -> list[Fraction]:
    """The numbers that a text writes as simple words."""
    return [NUMBER_WORDS[word] for word in re.findall(r"[a-z]+", text.lower()) if word in NUMBER_WORDS]


@dataclass(frozen=True)
class Literal:
    """A number in an expression, from ``start`` to ``end``, with its exact value."""

    start: int
    end: int
    value: Fraction


def literals(expression: str) -> list[Literal]:
    """The numbers of an expression, in order."""
    nodes = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Constant)]
    return [
        Literal(node.col_offset, node.end_col_offset or 0, _exact(node, expression))
        for node in sorted(nodes, key=lambda node: node.col_offset)
    ]


def _exact(node: ast.Constant, expression: str) -> Fraction:
    return Fraction((ast.get_source_segment(expression, node) or str(node.value)).replace("_", ""))


def evaluate(
    expression: str, names: Mapping[str, Fraction] | None = None, *, seen: list[Fraction] | None = None
) -> Fraction:
    """The exact value of an expression of numbers and ``names``.

    Appends the value of each operation to ``seen``. Raises Rejected if there is no value.
    """

    def at(node: ast.AST) -> Fraction:
        match node:
            case ast.Expression():
                return at(node.body)
            case ast.Constant():
                return _exact(node, expression)
            case ast.Name():
                return (names or {})[node.id]
            case ast.UnaryOp(op=ast.USub()):
                return -at(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return at(node.operand)
            case ast.BinOp():
                left, right = at(node.left), at(node.right)
                if isinstance(node.op, ast.Pow) and right.denominator == 1 and abs(right) <= MAX_POWER:
                    value = Fraction(left**right)
                elif (operator := _OPERATORS.get(type(node.op))) is not None:
                    value = operator(left, right)
                else:
                    raise Rejected("calculation", f"{expression} has an unsupported operator")
                if seen is not None:
                    seen.append(value)
                return value
            case _:
                raise Rejected("calculation", f"{expression} is not only arithmetic")

    try:
        return at(ast.parse(expression, mode="eval"))
    except (ZeroDivisionError, ValueError) as error:
        raise Rejected("calculation", f"{expression} has no value: {error}") from error


def require_stated(step: Step, value: Fraction) -> None:
    """Raise Rejected unless the value, rounded or truncated, is the step's stated value."""
    if not is_close(Decimal(value.numerator) / Decimal(value.denominator), step.stated):
        raise Rejected("calculation", f"{step.expression} is not the stated {step.stated}")


def is_close(value: Decimal, stated: Decimal) -> bool:
    """Whether two values agree to the last digit of the stated one."""
    exponent = stated.as_tuple().exponent
    assert isinstance(exponent, int), "stated values are finite"
    return abs(value - stated) < Decimal(1).scaleb(min(exponent, 0))


def program_of(question: str, solution: Solution) -> str:
    """The solution as one program whose steps have the stated values.

    Results of divisions and decimals are rounded when printed. Raises Rejected, for example if an
    operand could come from two steps.
    """
    in_question = {value_of(found) for found in NUMBER.findall(question)} | set(word_values(question))
    stated = [Fraction(step.stated) for step in solution.steps]
    after = [*(step.text for step in solution.steps[1:]), solution.rest]
    lines, linked, values = list[str](), list[str](), dict[str, Fraction]()
    for index, step in enumerate(solution.steps):
        linked.append(link(step.expression, in_question, stated[:index]))
        if _only_states(linked[-1], in_question):
            raise Rejected("calculation", f"step {index + 1} states {linked[-1]} and calculates nothing")
        comment = _comment(step.text, after[index], in_question, stated[: index + 1])
        lines.append(f"# {comment}\nstep{index + 1} = {linked[-1]}\n")
    for index, step in enumerate(solution.steps):
        values[f"step{index + 1}"] = evaluate(linked[index], values)
        require_stated(step, values[f"step{index + 1}"])
    last = f"step{len(lines)}"
    is_rounded = any("/" in each or "." in each for each in linked)
    return f"{''.join(lines)}print({f'round({last}, {ROUNDED_DIGITS})' if is_rounded else last})"


def link(expression: str, in_question: set[Fraction], earlier: Sequence[Fraction]) -> str:
    """Replace each operand that can only be the value of step N with ``stepN``."""
    out = expression
    for operand in reversed(literals(expression)):
        steps = [f"step{number}" for number, value in enumerate(earlier, 1) if value == operand.value]
        if operand.value in in_question or not steps:
            continue
        if len(steps) > 1:
            raise Rejected("calculation", f"{operand.value} in {expression} may be {' or '.join(steps)}")
        out = f"{out[: operand.start]}{steps[0]}{out[operand.end :]}"
    return out


def _only_states(linked: str, in_question: set[Fraction]) -> bool:
    """Whether an expression is only a number, and one that is not in the question."""
    calculates = any(isinstance(node, ast.BinOp) for node in ast.walk(ast.parse(linked, mode="eval")))
    found = literals(linked)
    return not calculates and bool(found) and found[0].value not in in_question


def _comment(before: str, after: str, in_question: set[Fraction], values: Sequence[Fraction]) -> str:
    """The sentence around a calculation, without the calculation and its result."""
    head = _EXPRESSION.sub("", f" {before.rpartition(chr(10))[2]}")
    tail = _RESULT.sub("", after.partition("\n")[0])
    if "=" in tail or NUMBER.search(tail):
        tail = tail.partition(".")[0] if "=" not in tail else ""
    text = " ".join(f"{head.rstrip(' =$')} {tail}".split())

    def named(match: re.Match[str]) -> str:
        value = value_of(match[1])
        steps = [number for number, each in enumerate(values, 1) if each == value]
        return f"step{steps[-1]}" if steps and value not in in_question else match[0]

    text = re.sub(rf"\$?({NUMBER.pattern})", named, text)
    text = _TWICE.sub(r"\1", text).replace(" .", ".").strip(" ,;")
    return text[:MAX_COMMENT_CHARS].strip() or f"step {len(values)}"
