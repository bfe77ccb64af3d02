r"""GSM8K's problems with large numbers: the same texts and calculations, which no head does.

Every number of the question that a calculation takes is replaced by one that is 1,000 to 100,000
times as large, in question, solution and marks, and each step is calculated again with fractions. A
problem survives these stages:

- source: every operand is a number of the question, an earlier step's value, or a constant that a
  word explains, and only one of them; so is every number of the solution's text;
- calculation: numbers were found with which each step is whole and has its sign of before, as has
  every part of it, and the question's numbers keep their order;
- execution: the solution as one program runs and prints the new answer.

Where numbers cannot all be replaced (a count times a price, beside a sum of money), as many are as
can be.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from math import log10

from retool_mcore.data.build import Solution, parse_gsm8k
from retool_mcore.data.large_text import (
    Number,
    asks_average,
    explained,
    is_of_ages,
    numbers_in,
    replaced,
    rewritten,
    words_in,
)
from retool_mcore.data.parts import ORIGINAL
from retool_mcore.data.programs import evaluate, literal, operands
from retool_mcore.data.verify import Rejected, Stage

STAGES: tuple[Stage, ...] = ("source", "calculation", "execution")
SMALLEST_FACTOR, LARGEST_FACTOR = 1_000, 100_000
LARGEST_VALUE = 10**13  # of any part of a calculation: a float still holds it to the second decimal
DRAWS_OF_ALL, DRAWS_OF_SOME = 60, 90
JITTER = 1.35  # about the scale that the numbers of one draw share
ALL_MODES = 3


@dataclass(frozen=True)
class Operand:
    """A literal of a calculation; ``number`` of the question or ``step`` that it is, or neither."""

    start: int
    end: int
    value: Fraction
    number: Fraction | None = None
    step: int | None = None

    def new(self, numbers: Mapping[Fraction, Fraction], steps: Sequence[Fraction]) -> Fraction:
        if self.step is not None:
            return steps[self.step]
        return numbers.get(self.value, self.value) if self.number is not None else self.value


@dataclass(frozen=True)
class EnlargedProblem:
    """A problem whose every operand is known. ``free``: the question's numbers to replace."""

    question: str
    solution: Solution
    operands: tuple[tuple[Operand, ...], ...]  # of each step
    free: tuple[Fraction, ...]
    stated: tuple[Fraction, ...]
    constants: frozenset[Fraction]


def read(question: str, answer: str) -> EnlargedProblem:
    """Find what each operand is. Raises Rejected where that is not certain."""
    solution = parse_gsm8k(answer)
    if is_of_ages(question):
        raise Rejected("source", "ages: large ones make no sense")
    stated = tuple(Fraction(step.stated) for step in solution.steps)
    for step, value in zip(solution.steps, stated, strict=True):
        if evaluate(step.expression) != value:
            raise Rejected("source", f"rounded: {step.expression} is not exactly {step.stated}")
        if value < 0:
            raise Rejected("source", f"negative: in {step.expression} = {step.stated} the sign is no operand's")
    if value_or_none(solution.truth) != stated[-1]:
        raise Rejected("source", f"another answer: {solution.truth} after a last step of {stated[-1]}")
    told = numbers_in(question)
    counts = Counter(number.value for number in told) + words_in(question)
    free = {number.value for number in told if not number.fixed and counts[number.value] == 1}
    constants = explained(question, answer)
    free -= constants  # 2 in a question that says "half" may be either, and both stay right if it stays
    if asks_average(question):
        free -= divisors(solution)
    known = _Known(counts, frozenset(free), stated, frozenset(constants))
    found = resolved(solution, known)
    used = {operand.number for each in found for operand in each if operand.number is not None}
    free_used = tuple(number.value for number in told if number.value in used)
    if not free_used:
        raise Rejected("source", "nothing to replace: no calculation takes a whole number of the question")
    fixed = {operand.value for each in found for operand in each if operand.number is None and operand.step is None}
    fixed |= {value for value in counts if value not in used}
    return EnlargedProblem(question, solution, found, free_used, stated, frozenset(fixed | known.constants))


def value_or_none(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except ValueError:
        return None


def divisors(solution: Solution) -> set[Fraction]:
    """The literals that calculations divide by."""
    return {
        operand.value
        for step in solution.steps
        for operand in literals(step.expression)
        if divides(step.expression, operand)
    }


def divides(expression: str, operand: Operand) -> bool:
    return expression[: operand.start].rstrip(" (").endswith("/")


def literals(expression: str) -> list[Operand]:
    """The number literals of an expression in order, of no known source yet."""
    found: list[Operand] = []
    for node in sorted(operands(expression), key=lambda node: node.col_offset):
        assert node.end_col_offset is not None, "parsed from text"
        found.append(Operand(node.col_offset, node.end_col_offset, literal(node, expression)))
    return found


@dataclass(frozen=True)
class _Known:
    """What an operand may be: a number that the question states so often, a step, a constant."""

    counts: Mapping[Fraction, int]
    free: frozenset[Fraction]
    stated: Sequence[Fraction]
    constants: frozenset[Fraction]

    def steps(self, operand: Operand, index: int) -> list[int]:
        return [each for each in range(index) if self.stated[each] == operand.value]

    def is_told(self, operand: Operand) -> bool:
        return self.counts.get(operand.value, 0) > 0


def resolved(solution: Solution, known: _Known) -> tuple[tuple[Operand, ...], ...]:
    """The operands of each step with their sources.

    A constant that is also the value of the step just before is that step, where nothing else takes
    it: a solution calculates nothing in vain. Raises Rejected where a source is not certain.
    """
    all_of = [literals(step.expression) for step in solution.steps]
    takes = Counter(
        each for index, found in enumerate(all_of) for operand in found for each in known.steps(operand, index)
    )
    out: list[tuple[Operand, ...]] = []
    for index, found in enumerate(all_of):
        out.append(tuple(_source(operand, index, solution.steps[index].expression, known, takes) for operand in found))
    return tuple(out)


def _source(operand: Operand, index: int, expression: str, known: _Known, takes: Mapping[int, int]) -> Operand:
    steps = known.steps(operand, index)
    told = known.is_told(operand)
    constant = operand.value in known.constants
    in_vain = len(steps) == 1 and takes[steps[0]] == 1 and steps[0] == index - 1
    if len(steps) + told > 1 or (steps and constant and not in_vain):
        raise Rejected("source", f"two sources: {operand.value} in {expression} may be a step, or something else")
    if steps:
        return replace(operand, step=steps[0])
    if told:
        return replace(operand, number=operand.value if operand.value in known.free else None)
    if constant:
        return operand
    reason = f"unknown operand: {operand.value} in {expression} is of no text, no step, and no known constant"
    raise Rejected("source", reason)


@dataclass(frozen=True)
class Enlarged:
    """New numbers of the question and the steps' new values, with each step's new expression."""

    numbers: Mapping[Fraction, Fraction]
    steps: tuple[Fraction, ...]
    expressions: tuple[str, ...]


def enlarge(problem: EnlargedProblem, generator: random.Random) -> Enlarged:
    """Draw new numbers until they fit. Raises Rejected when none did."""
    for numbers in _draws(problem, generator):
        if (found := calculated(problem, numbers)) is not None:
            return found
    raise Rejected("calculation", f"no numbers fit: {', '.join(step.expression for step in problem.solution.steps)}")


def _draws(problem: EnlargedProblem, generator: random.Random) -> Iterator[dict[Fraction, Fraction]]:
    """First draws of all numbers, then of ever fewer of them."""
    for index in range(DRAWS_OF_ALL):
        yield _draw(problem, problem.free, index % ALL_MODES, generator)
    sizes = range(len(problem.free) - 1, 0, -1)
    for size in sizes:
        for index in range(DRAWS_OF_SOME // len(sizes)):
            yield _draw(problem, generator.sample(problem.free, size), index % ALL_MODES, generator)


def _draw(
    problem: EnlargedProblem, chosen: Sequence[Fraction], mode: int, generator: random.Random
) -> dict[Fraction, Fraction]:
    """New numbers of one scale: equal to the old ones modulo the divisors, or multiples.

    Multiples of old numbers keep divisions whole; of two sizes, so that one divides the other.
    """
    if mode == 2:
        small = generator.randint(SMALLEST_FACTOR, 4 * SMALLEST_FACTOR)
        large = small * generator.randint(2, LARGEST_FACTOR // (4 * SMALLEST_FACTOR))
        return {value: value * generator.choice((small, large)) for value in chosen}
    modulus = _modulus(problem)
    scale = 10 ** generator.uniform(log10(SMALLEST_FACTOR * JITTER), log10(LARGEST_FACTOR / JITTER))
    made: dict[Fraction, Fraction] = {}
    for value in chosen:
        wanted = int(value * Fraction(scale) * Fraction(generator.uniform(1 / JITTER, JITTER)))
        made[value] = Fraction(wanted // modulus * modulus + (int(value) % modulus if mode == 0 else 0))
    return made


def _modulus(problem: EnlargedProblem) -> int:
    """The product of what calculations divide by that stays, of decimals, too; small enough."""
    out = 1
    for step, found in zip(problem.solution.steps, problem.operands, strict=True):
        for operand in found:
            stays = operand.number is None and operand.step is None
            if stays and operand.value.denominator > 1:
                out *= operand.value.denominator
            elif stays and operand.value > 1 and divides(step.expression, operand):
                out *= operand.value.numerator
    return out if out <= SMALLEST_FACTOR else 1


def calculated(problem: EnlargedProblem, numbers: Mapping[Fraction, Fraction]) -> Enlarged | None:
    """The solution with these numbers, or None where they do not fit."""
    if any(not SMALLEST_FACTOR * old <= new <= LARGEST_FACTOR * old for old, new in numbers.items()):
        return None
    ordered = sorted(numbers)
    if any(numbers[low] >= numbers[high] for low, high in pairwise(ordered)):
        return None
    if len(set(numbers.values()) | problem.constants) < len(numbers) + len(problem.constants):
        return None
    bounds = [number for number in numbers_in(problem.question) if number.bound and not number.fixed]
    if any(number.value not in numbers for number in bounds):
        return None  # what it bounds grows, and it would not
    steps: list[Fraction] = []
    expressions: list[str] = []
    for step, found in zip(problem.solution.steps, problem.operands, strict=True):
        expression = step.expression
        for operand in reversed(found):
            new = operand.new(numbers, steps)
            if new != operand.value:
                expression = f"{expression[: operand.start]}{new.numerator}{expression[operand.end :]}"
        before: list[Fraction] = []
        after: list[Fraction] = []
        evaluate(step.expression, seen=before)
        try:
            value = evaluate(expression, seen=after)
        except Rejected:
            return None
        signs = all(_sign(a) == _sign(b) for a, b in zip(before, after, strict=True))
        if not signs or value.denominator != 1 or any(abs(each) > LARGEST_VALUE for each in after):
            return None
        steps.append(value)
        expressions.append(expression)
    if steps[-1] == problem.stated[-1]:
        return None  # an answer that may be known by heart
    return Enlarged(numbers, tuple(steps), tuple(expressions))


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)


def variant(question: str, answer: str, seed: int) -> dict[str, str]:
    """A row of GSM8K's form with large numbers; seed and question decide them. Raises Rejected."""
    problem = read(question, answer)
    digest = blake2b(f"{seed}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    found = enlarge(problem, random.Random(int.from_bytes(digest, "big")))
    _refuse_words(problem, found)

    def new(number: Number) -> Fraction:
        return found.numbers.get(number.value, number.value)

    return {
        "question": replaced(question, numbers_in(question), new),
        "answer": _answer(problem, found),
        ORIGINAL: question,
    }


def _refuse_words(problem: EnlargedProblem, found: Enlarged) -> None:
    changed = {old for old, new in zip(problem.stated, found.steps, strict=True) if old != new} | set(found.numbers)
    if in_words := changed & set(words_in(problem.solution.body)):
        raise Rejected("source", f"in words: the solution writes {min(in_words)} as a word")


def _answer(problem: EnlargedProblem, found: Enlarged) -> str:
    """The solution's text with new numbers and marks."""
    candidates: dict[Fraction, set[Fraction]] = {value: {value} for value in problem.constants}
    for value in problem.free:
        candidates.setdefault(value, set()).add(found.numbers.get(value, value))
    texts = _texts(problem.solution)
    out: list[str] = []
    first: tuple[Fraction, Fraction] | None = None
    for index, expression in enumerate(found.expressions):
        operands_now = [(each.value, each.new(found.numbers, found.steps)) for each in problem.operands[index]]
        out.append(rewritten(texts[index], candidates, first=first, last=operands_now))
        out.append(f"<<{expression}={found.steps[index].numerator}>>")
        first = problem.stated[index], found.steps[index]
        candidates.setdefault(first[0], set()).add(first[1])
    out.append(rewritten(texts[-1], candidates, first=first, last=()))
    return f"{''.join(out).rstrip()}\n#### {found.steps[-1].numerator}"


def _texts(solution: Solution) -> list[str]:
    """The texts around the marks, as they are written."""
    texts = solution.body.replace(">>", "<<").split("<<")[::2]
    assert len(texts) == len(solution.steps) + 1, "parse_gsm8k refuses broken marks"
    return texts
