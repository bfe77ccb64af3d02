r"""GSM8K's problems with large numbers: the same texts and calculations, which no head does.

    python launch/gsm8k/large.py train.jsonl --draws 3 --out large_train.jsonl

Every number of the question that a calculation takes is replaced by one that is 1,000 to 100,000
times as large, in question, solution and marks, and each step is calculated again with fractions. A
problem survives these stages:

- source: every operand is a number of the question, an earlier step's value, or a constant that a
  word explains, and only one of them; so is every number of the solution's text;
- calculation: numbers were found with which each step is whole and has its sign of before, as has
  every part of it, and the question's numbers keep their order;
- execution: the solution as one program runs and prints the new answer.

Where numbers cannot all be replaced (a count times a price, next to a sum of money), as many are as
can be. ``original_question`` decides the part of a row, so a variant is in the part of its
original.
"""

import asyncio
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Annotated, Any

import typer
from solutions import Literal, Solution, evaluate, literals, parse, word_values
from texts import AGES, AVERAGE, explained, numbers_in, replaced, rewritten
from traces import ROWS_AT_ONCE, problem_rows, texts_of

from retool_mcore.cli.common import guarded, output_named, tell, with_bar
from retool_mcore.cli.data import JSON_LINES, Limit, Rejects, rows_of, write_report
from retool_mcore.data.split import ORIGINAL
from retool_mcore.data.verify import Rejected, VerifiedRows
from retool_mcore.errors import DataError
from retool_mcore.process import die_with_parent
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox

STAGES = ("source", "calculation", "execution")
SMALLEST_FACTOR, LARGEST_FACTOR = 1_000, 100_000
LARGEST_VALUE = 10**13  # of any part of a calculation: a float still holds it to the second decimal
DRAWS_OF_ALL, DRAWS_OF_SOME = 60, 90
JITTER = 1.35  # about the scale that the numbers of one draw share
ALL_MODES = 3


@dataclass(frozen=True)
class Operand:
    """A number of a calculation, which is a free number of the question, a ``step``, or neither."""

    literal: Literal
    free: bool = False
    step: int | None = None

    @property
    def stays(self) -> bool:
        return not self.free and self.step is None

    def new(self, numbers: Mapping[Fraction, Fraction], steps: Sequence[Fraction]) -> Fraction:
        value = self.literal.value
        if self.step is not None:
            return steps[self.step]
        return numbers.get(value, value) if self.free else value


@dataclass(frozen=True)
class Problem:
    """A problem whose every operand is known. ``free``: the question's numbers to replace."""

    question: str
    solution: Solution
    operands: tuple[tuple[Operand, ...], ...]  # of each step
    free: tuple[Fraction, ...]
    stated: tuple[Fraction, ...]
    constants: frozenset[Fraction]


def read(question: str, answer: str) -> Problem:
    """Find what each operand is. Raises Rejected where that is not certain."""
    solution = parse(answer)
    stated = tuple(Fraction(step.stated) for step in solution.steps)
    _require_whole(question, solution, stated)
    named = numbers_in(question)
    counts = Counter(number.value for number in named) + words_in(question)
    constants = explained(question, answer)
    # 2 in a question that says "half" may be either, and both stay right if it stays
    free = {number.value for number in named if not number.fixed and counts[number.value] == 1} - constants
    if AVERAGE.search(question):  # what is divided by may be how many things the question lists
        found = [(step.expression, each) for step in solution.steps for each in literals(step.expression)]
        free -= {each.value for expression, each in found if divides(expression, each)}
    operands = _operands(solution, stated, counts, free, constants)
    used = {operand.literal.value for each in operands for operand in each if operand.free}
    if not used:
        raise Rejected("source", "nothing to replace: no calculation takes a whole number of the question")
    fixed = {operand.literal.value for each in operands for operand in each if operand.stays} | (set(counts) - used)
    free_used = tuple(number.value for number in named if number.value in used)
    return Problem(question, solution, operands, free_used, stated, frozenset(fixed | constants))


def _require_whole(question: str, solution: Solution, stated: Sequence[Fraction]) -> None:
    if AGES.search(question):
        raise Rejected("source", "ages: large ones make no sense")
    for step, value in zip(solution.steps, stated, strict=True):
        if evaluate(step.expression) != value:
            raise Rejected("source", f"rounded: {step.expression} is not exactly {step.stated}")
        if value < 0:
            raise Rejected("source", f"negative: in {step.expression} = {step.stated} the sign is no operand's")
    try:
        truth = Fraction(solution.truth)
    except ValueError:
        truth = None
    if truth != stated[-1]:
        raise Rejected("source", f"another answer: {solution.truth} after a last step of {stated[-1]}")


def words_in(text: str) -> Counter[Fraction]:
    """How often each number is written in a simple word; "one" is mostly no number."""
    return Counter(value for value in word_values(text) if value != 1)


def divides(expression: str, operand: Literal) -> bool:
    return expression[: operand.start].rstrip(" (").endswith("/")


def _operands(
    solution: Solution,
    stated: Sequence[Fraction],
    counts: Mapping[Fraction, int],
    free: set[Fraction],
    constants: set[Fraction],
) -> tuple[tuple[Operand, ...], ...]:
    """The operands of each step. Raises Rejected where it is not certain what one is.

    A constant that is also the value of the step just before is that step, where nothing else takes
    it: a solution calculates nothing in vain.
    """
    found = [literals(step.expression) for step in solution.steps]

    def equal_steps(literal: Literal, index: int) -> list[int]:
        return [each for each in range(index) if stated[each] == literal.value]

    takes = Counter(
        step for index, each in enumerate(found) for literal in each for step in equal_steps(literal, index)
    )

    def operand(literal: Literal, index: int) -> Operand:
        steps, value, expression = equal_steps(literal, index), literal.value, solution.steps[index].expression
        named, constant = counts.get(value, 0) > 0, value in constants
        in_vain = len(steps) == 1 and takes[steps[0]] == 1 and steps[0] == index - 1
        if len(steps) + named > 1 or (steps and constant and not in_vain):
            raise Rejected("source", f"two sources: {value} in {expression} may be a step, or something else")
        if not (steps or named or constant):
            reason = f"unknown operand: {value} in {expression} is of no text, no step, and no known constant"
            raise Rejected("source", reason)
        return Operand(literal, free=named and value in free, step=steps[0] if steps else None)

    return tuple(tuple(operand(literal, index) for literal in each) for index, each in enumerate(found))


@dataclass(frozen=True)
class Enlarged:
    """New numbers of the question and the steps' new values, with each step's new expression."""

    numbers: Mapping[Fraction, Fraction]
    steps: tuple[Fraction, ...]
    expressions: tuple[str, ...]


def enlarge(problem: Problem, generator: random.Random) -> Enlarged:
    """Draw new numbers until they fit. Raises Rejected when none did."""
    for numbers in _draws(problem, generator):
        if (found := calculated(problem, numbers)) is not None:
            return found
    raise Rejected("calculation", f"no numbers fit: {', '.join(step.expression for step in problem.solution.steps)}")


def _draws(problem: Problem, generator: random.Random) -> Iterator[dict[Fraction, Fraction]]:
    """First draws of all numbers, then of ever fewer of them."""
    for index in range(DRAWS_OF_ALL):
        yield _draw(problem, problem.free, index % ALL_MODES, generator)
    sizes = range(len(problem.free) - 1, 0, -1)
    for size in sizes:
        for index in range(DRAWS_OF_SOME // len(sizes)):
            yield _draw(problem, generator.sample(problem.free, size), index % ALL_MODES, generator)


def _draw(
    problem: Problem, chosen: Sequence[Fraction], mode: int, generator: random.Random
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


def _modulus(problem: Problem) -> int:
    """The product of what calculations divide by that stays, of decimals, too; small enough."""
    out = 1
    for step, operands in zip(problem.solution.steps, problem.operands, strict=True):
        for literal in (operand.literal for operand in operands if operand.stays):
            if literal.value.denominator > 1:
                out *= literal.value.denominator
            elif literal.value > 1 and divides(step.expression, literal):
                out *= literal.value.numerator
    return out if out <= SMALLEST_FACTOR else 1


def calculated(problem: Problem, numbers: Mapping[Fraction, Fraction]) -> Enlarged | None:
    """The solution with these numbers, or None where they do not fit."""
    in_range = all(SMALLEST_FACTOR * old <= new <= LARGEST_FACTOR * old for old, new in numbers.items())
    in_order = all(numbers[low] < numbers[high] for low, high in pairwise(sorted(numbers)))
    distinct = len(set(numbers.values()) | problem.constants) == len(numbers) + len(problem.constants)
    bounds = [number for number in numbers_in(problem.question) if number.bound and not number.fixed]
    if not (in_range and in_order and distinct) or any(number.value not in numbers for number in bounds):
        return None  # the last: what it bounds grows, and it would not
    steps, expressions = list[Fraction](), list[str]()
    for step, operands in zip(problem.solution.steps, problem.operands, strict=True):
        expression = step.expression
        for operand in reversed(operands):
            if (new := operand.new(numbers, steps)) != operand.literal.value:
                expression = f"{expression[: operand.literal.start]}{new.numerator}{expression[operand.literal.end :]}"
        before, after = list[Fraction](), list[Fraction]()
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
    changed = {old for old, new in zip(problem.stated, found.steps, strict=True) if old != new} | set(found.numbers)
    if in_words := changed & set(words_in(problem.solution.body)):
        raise Rejected("source", f"in words: the solution writes {min(in_words)} as a word")
    new = [(number, found.numbers.get(number.value, number.value)) for number in numbers_in(question)]
    return {"question": replaced(question, new), "answer": _answer(problem, found), ORIGINAL: question}


def _answer(problem: Problem, found: Enlarged) -> str:
    """The solution's text with new numbers and marks."""
    candidates: dict[Fraction, set[Fraction]] = {value: {value} for value in problem.constants}
    for value in problem.free:
        candidates.setdefault(value, set()).add(found.numbers.get(value, value))
    texts = problem.solution.body.replace(">>", "<<").split("<<")[::2]
    out: list[str] = []
    first: tuple[Fraction, Fraction] | None = None
    for index, expression in enumerate(found.expressions):
        new = [(each.literal.value, each.new(found.numbers, found.steps)) for each in problem.operands[index]]
        out.append(rewritten(texts[index], candidates, first=first, last=new))
        out.append(f"<<{expression}={found.steps[index].numerator}>>")
        first = problem.stated[index], found.steps[index]
        candidates.setdefault(first[0], set()).add(first[1])
    out.append(rewritten(texts[-1], candidates, first=first, last=()))
    return f"{''.join(out).rstrip()}\n#### {found.steps[-1].numerator}"


def found_or_why(question: str, answer: str, seed: int) -> dict[str, str] | tuple[str, str]:
    """``variant``, or stage and reason of a reject: what a process can send."""
    try:
        return variant(question, answer, seed)
    except Rejected as rejected:
        return rejected.stage, rejected.reason


async def build(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    sandbox: Sandbox,
    on_row: Callable[[], None] = lambda: None,
    *,
    seed: int = 0,
    draws: int = 1,
) -> VerifiedRows:
    """Variants of all rows (where, {question, answer}), each run once as one program.

    Of ``draws`` seeds from ``seed`` on: first all rows with the first one's numbers, in order, then
    all with the next one's. Raises DataError when a row has another schema, or none survived.
    """
    slots, loop = asyncio.Semaphore(ROWS_AT_ONCE), asyncio.get_running_loop()

    async def made(index: int, where: str, source: Mapping[str, Any], seed: int) -> dict[str, str] | Rejected:
        async with slots:
            on_row()
            row = await loop.run_in_executor(pool, found_or_why, *texts_of(where, source), seed)
            if isinstance(row, tuple):
                return Rejected(*row)
            try:
                await problem_rows(where, index, row, sandbox)
            except Rejected as rejected:
                return Rejected("execution", f"its program: {rejected}")
            return row

    wanted = [(*row, each) for each in range(seed, seed + draws) for row in rows]
    with _processes(len(rows)) as pool:  # the search for numbers is arithmetic in Python: 5 ms a row
        results = await asyncio.gather(*(made(index, *each) for index, each in enumerate(wanted)))
    report, seen = VerifiedRows(STAGES), set[str]()
    for (where, source, of_seed), result in zip(wanted, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, source)
        elif result["question"] in seen:
            copy = Rejected("calculation", f"a copy: seed {of_seed} draws the numbers of an earlier one")
            report.reject(where, copy, source)
        else:
            seen.add(result["question"])
            report.rows.append(result)
    if not report.rows:
        raise DataError(f"none of {len(wanted)} problems survived; the first reject: {report.rejects[:1]}")
    return report


def _processes(rows: int) -> Executor:
    # spawned: a fork would hold what the sandbox has open
    workers = max(1, min(len(os.sched_getaffinity(0)), rows))
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one answers


@guarded
def main(
    source: Annotated[Path, typer.Argument(help="GSM8K as JSON lines {question, answer}.")],
    *,
    out: Annotated[Path, typer.Option(help="JSON lines to write, in GSM8K's form.")],
    rejects: Rejects = None,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other numbers.")] = 0,
    draws: Annotated[int, typer.Option(min=1, help="Variants of each problem, of SEED and the seeds after it.")] = 1,
) -> None:
    """Write GSM8K's problems with large numbers, calculated again and verified by execution."""
    output_named(out, JSON_LINES, [source])
    rows = rows_of(str(source), limit)

    async def run(on_row: Callable[[], None]) -> VerifiedRows:
        # Any isolation level will do: the programs are arithmetic of numbers.
        async with open_sandbox("local", min_level="rlimits") as sandbox:
            return await build(rows, sandbox, on_row, seed=seed, draws=draws)

    report = with_bar(run, len(rows) * draws)
    write_report(report, out, rejects)
    counts = Counter(str(reject["reason"]).partition(":")[0] for reject in report.rejects)
    tell("\n".join(f"{count} rejected: {reason}" for reason, count in counts.most_common()))


if __name__ == "__main__":
    typer.run(main)
