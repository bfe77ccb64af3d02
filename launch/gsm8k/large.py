r"""Makes variants of GSM8K's problems with numbers too large for mental arithmetic.

    python launch/gsm8k/large.py train.jsonl --draws 3 --out large_train.jsonl

Scales the question's numbers that calculations use by 1,000 to 100,000, in the question, the
solution and its calculation marks, and recalculates each step with fractions. A problem must pass
these stages:

- source: each operand has exactly one source: a number of the question, an earlier step's value, or
  a constant that a word implies ("dozen": 12). So does each number in the solution's text.
- calculation: there are new numbers for which each step is an integer, each part of a step keeps
  its sign, and the question's numbers keep their order.
- execution: the solution runs as one program and prints the new answer.

If not all numbers can be replaced (a count times a price may exceed a sum of money), the program
replaces as many as possible. ``original_question`` determines a row's part, so a variant is
in the same part as its original.
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
from texts import AGES, AVERAGE, explained_constants, numbers_in, replace_numbers, rewrite
from traces import ROWS_AT_ONCE, problem_rows, texts_of

from retool_mcore.cli.common import check_output, echo, guarded, with_bar
from retool_mcore.cli.data import JSON_LINES, Limit, Rejects, rows_of, write_report
from retool_mcore.data.split import ORIGINAL
from retool_mcore.data.verify import ConversionReport, Rejected
from retool_mcore.errors import DataError
from retool_mcore.process import die_with_parent
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox

STAGES = ("source", "calculation", "execution")
MIN_FACTOR, MAX_FACTOR = 1_000, 100_000
MAX_VALUE = 10**13  # of any intermediate result: a float represents it to two decimals
DRAWS_OF_ALL, DRAWS_OF_SOME = 60, 90  # tries to replace all numbers, then some of them
JITTER = 1.35  # random factor of each number around the common scale of a draw
NUM_MODES = 3  # of `_draw`


@dataclass(frozen=True)
class Operand:
    """A number in a calculation. ``free``: replaceable. ``step``: the step whose value it is."""

    literal: Literal
    free: bool = False
    step: int | None = None

    @property
    def is_fixed(self) -> bool:
        return not self.free and self.step is None

    def new(self, numbers: Mapping[Fraction, Fraction], steps: Sequence[Fraction]) -> Fraction:
        value = self.literal.value
        if self.step is not None:
            return steps[self.step]
        return numbers.get(value, value) if self.free else value


@dataclass(frozen=True)
class Problem:
    """A problem whose operands have known sources. ``free``: the question's numbers to replace."""

    question: str
    solution: Solution
    operands: tuple[tuple[Operand, ...], ...]  # per step
    free: tuple[Fraction, ...]
    stated: tuple[Fraction, ...]
    constants: frozenset[Fraction]


def find_sources(question: str, answer: str) -> Problem:
    """Find the source of each operand. Raises Rejected if a source is ambiguous."""
    solution = parse(answer)
    stated = tuple(Fraction(step.stated) for step in solution.steps)
    _require_exact(question, solution, stated)
    named = numbers_in(question)
    counts = Counter(number.value for number in named) + word_numbers(question)
    constants = explained_constants(question, answer)
    # With "half" in the question, a 2 may be that constant or a number of the question. Keeping it
    # is right in both cases.
    free = {number.value for number in named if not number.fixed and counts[number.value] == 1} - constants
    if AVERAGE.search(question):  # a divisor may be the number of things that the question lists
        operands_of = [(step.expression, literal) for step in solution.steps for literal in literals(step.expression)]
        free -= {literal.value for expression, literal in operands_of if divides(expression, literal)}
    operands = _operands(solution, stated, counts, free, constants)
    used = {operand.literal.value for of_step in operands for operand in of_step if operand.free}
    if not used:
        raise Rejected("source", "nothing to replace: no calculation uses an integer of the question")
    unchanged = {operand.literal.value for of_step in operands for operand in of_step if operand.is_fixed}
    fixed = unchanged | (set(counts) - used)
    free_used = tuple(number.value for number in named if number.value in used)
    return Problem(question, solution, operands, free_used, stated, frozenset(fixed | constants))


def _require_exact(question: str, solution: Solution, stated: Sequence[Fraction]) -> None:
    if AGES.search(question):
        raise Rejected("source", "ages: large ages make no sense")
    for step, value in zip(solution.steps, stated, strict=True):
        if evaluate(step.expression) != value:
            raise Rejected("source", f"rounded: {step.expression} is not exactly {step.stated}")
        if value < 0:
            raise Rejected("source", f"negative: {step.expression} = {step.stated}")
    try:
        truth = Fraction(solution.truth)
    except ValueError:
        truth = None
    if truth != stated[-1]:
        raise Rejected("source", f"another answer: {solution.truth}, but the last step gives {stated[-1]}")


def word_numbers(text: str) -> Counter[Fraction]:
    """Counts of numbers written as simple words, except "one", which is rarely a number."""
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
    """The operands of each step. Raises Rejected if the source of one is ambiguous.

    An operand that could be a constant or the previous step's value is that value if it is the only
    use of it, because a solution does not calculate an unused value.
    """
    literals_of = [literals(step.expression) for step in solution.steps]

    def equal_steps(literal: Literal, index: int) -> list[int]:
        return [step for step in range(index) if stated[step] == literal.value]

    uses = Counter[int]()
    for index, of_step in enumerate(literals_of):
        for literal in of_step:
            uses.update(equal_steps(literal, index))

    def operand(literal: Literal, index: int) -> Operand:
        steps, value, expression = equal_steps(literal, index), literal.value, solution.steps[index].expression
        named, constant = counts.get(value, 0) > 0, value in constants
        only_use = len(steps) == 1 and uses[steps[0]] == 1 and steps[0] == index - 1
        if len(steps) + named > 1 or (steps and constant and not only_use):
            raise Rejected("source", f"two sources: {value} in {expression} has more than one possible source")
        if not (steps or named or constant):
            reason = f"unknown operand: {value} in {expression} is in neither the question nor a step, and no constant"
            raise Rejected("source", reason)
        return Operand(literal, free=named and value in free, step=steps[0] if steps else None)

    return tuple(tuple(operand(literal, index) for literal in of_step) for index, of_step in enumerate(literals_of))


@dataclass(frozen=True)
class Enlarged:
    """New numbers of the question, and each step's new value and expression."""

    numbers: Mapping[Fraction, Fraction]
    steps: tuple[Fraction, ...]
    expressions: tuple[str, ...]


def enlarge(problem: Problem, generator: random.Random) -> Enlarged:
    """Draw new numbers until some fit. Raises Rejected if none do."""
    for numbers in _draws(problem, generator):
        if (enlarged := recalculate(problem, numbers)) is not None:
            return enlarged
    raise Rejected("calculation", f"no numbers fit: {', '.join(step.expression for step in problem.solution.steps)}")


def _draws(problem: Problem, generator: random.Random) -> Iterator[dict[Fraction, Fraction]]:
    """Yield draws that replace all numbers, then draws that replace fewer and fewer of them."""
    for index in range(DRAWS_OF_ALL):
        yield _draw(problem, problem.free, index % NUM_MODES, generator)
    sizes = range(len(problem.free) - 1, 0, -1)
    for size in sizes:
        for index in range(DRAWS_OF_SOME // len(sizes)):
            yield _draw(problem, generator.sample(problem.free, size), index % NUM_MODES, generator)


def _draw(
    problem: Problem, chosen: Sequence[Fraction], mode: int, generator: random.Random
) -> dict[Fraction, Fraction]:
    """Draw new numbers of one scale, in one of three modes.

    Mode 0: congruent to the old numbers modulo the problem's divisors. Mode 1: multiples of these
    divisors. Mode 2: the old numbers times one of two factors, of which one divides the other, so
    that quotients stay integers.
    """
    if mode == 2:
        small = generator.randint(MIN_FACTOR, 4 * MIN_FACTOR)
        large = small * generator.randint(2, MAX_FACTOR // (4 * MIN_FACTOR))
        return {value: value * generator.choice((small, large)) for value in chosen}
    modulus = _modulus(problem)
    scale = 10 ** generator.uniform(log10(MIN_FACTOR * JITTER), log10(MAX_FACTOR / JITTER))
    made: dict[Fraction, Fraction] = {}
    for value in chosen:
        wanted = int(value * Fraction(scale) * Fraction(generator.uniform(1 / JITTER, JITTER)))
        made[value] = Fraction(wanted // modulus * modulus + (int(value) % modulus if mode == 0 else 0))
    return made


def _modulus(problem: Problem) -> int:
    """The product of fixed divisors and of denominators of fixed decimals; 1 if too large."""
    out = 1
    for step, operands in zip(problem.solution.steps, problem.operands, strict=True):
        for literal in (operand.literal for operand in operands if operand.is_fixed):
            if literal.value.denominator > 1:
                out *= literal.value.denominator
            elif literal.value > 1 and divides(step.expression, literal):
                out *= literal.value.numerator
    return out if out <= MIN_FACTOR else 1


def recalculate(problem: Problem, numbers: Mapping[Fraction, Fraction]) -> Enlarged | None:
    """The solution with these numbers, or None if they do not fit."""
    in_range = all(MIN_FACTOR * old <= new <= MAX_FACTOR * old for old, new in numbers.items())
    in_order = all(numbers[low] < numbers[high] for low, high in pairwise(sorted(numbers)))
    distinct = len(set(numbers.values()) | problem.constants) == len(numbers) + len(problem.constants)
    bounds = [number for number in numbers_in(problem.question) if number.bound and not number.fixed]
    if not (in_range and in_order and distinct) or any(number.value not in numbers for number in bounds):
        return None  # last condition: a bound ("more than 5") must grow with the number that it bounds
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
        if not signs or value.denominator != 1 or any(abs(number) > MAX_VALUE for number in after):
            return None
        steps.append(value)
        expressions.append(expression)
    if steps[-1] == problem.stated[-1]:
        return None  # the model may have memorized this answer
    return Enlarged(numbers, tuple(steps), tuple(expressions))


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)


def variant(question: str, answer: str, seed: int) -> dict[str, str]:
    """A row in GSM8K's form with large numbers. Depends on seed and question. Raises Rejected."""
    problem = find_sources(question, answer)
    digest = blake2b(f"{seed}\n{question}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    enlarged = enlarge(problem, random.Random(int.from_bytes(digest, "big")))
    changed = {old for old, new in zip(problem.stated, enlarged.steps, strict=True) if old != new} | set(
        enlarged.numbers
    )
    if as_words := changed & set(word_numbers(problem.solution.body)):
        raise Rejected("source", f"number word: the solution writes {min(as_words)} as a word")
    new = [(number, enlarged.numbers.get(number.value, number.value)) for number in numbers_in(question)]
    return {"question": replace_numbers(question, new), "answer": _answer(problem, enlarged), ORIGINAL: question}


def _answer(problem: Problem, enlarged: Enlarged) -> str:
    """The solution's text with new numbers and marks."""
    candidates: dict[Fraction, set[Fraction]] = {value: {value} for value in problem.constants}
    for value in problem.free:
        candidates.setdefault(value, set()).add(enlarged.numbers.get(value, value))
    texts = problem.solution.body.replace(">>", "<<").split("<<")[::2]
    out: list[str] = []
    first: tuple[Fraction, Fraction] | None = None
    for index, expression in enumerate(enlarged.expressions):
        new = [
            (operand.literal.value, operand.new(enlarged.numbers, enlarged.steps))
            for operand in problem.operands[index]
        ]
        out.append(rewrite(texts[index], candidates, first=first, last=new))
        out.append(f"<<{expression}={enlarged.steps[index].numerator}>>")
        first = problem.stated[index], enlarged.steps[index]
        candidates.setdefault(first[0], set()).add(first[1])
    out.append(rewrite(texts[-1], candidates, first=first, last=()))
    return f"{''.join(out).rstrip()}\n#### {enlarged.steps[-1].numerator}"


def variant_or_reject(question: str, answer: str, seed: int) -> dict[str, str] | tuple[str, str]:
    """``variant``, or the stage and reason of its rejection, as a picklable result."""
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
) -> ConversionReport:
    """Make variants of all rows (where, {question, answer}) and run each variant's program.

    Uses ``draws`` seeds, starting with ``seed``: first all rows with the first seed, in order, then
    all rows with the next. Raises DataError if a row has another schema, or if no variant passes.
    """
    slots, loop = asyncio.Semaphore(ROWS_AT_ONCE), asyncio.get_running_loop()

    async def made(index: int, where: str, source: Mapping[str, Any], seed: int) -> dict[str, str] | Rejected:
        async with slots:
            on_row()
            row = await loop.run_in_executor(pool, variant_or_reject, *texts_of(where, source), seed)
            if isinstance(row, tuple):
                return Rejected(*row)
            try:
                await problem_rows(where, index, row, sandbox)
            except Rejected as rejected:
                return Rejected("execution", f"program: {rejected}")
            return row

    wanted = [(*row, row_seed) for row_seed in range(seed, seed + draws) for row in rows]
    with _processes(len(rows)) as pool:  # searching for numbers takes 5 ms of Python per row
        results = await asyncio.gather(*(made(index, *row) for index, row in enumerate(wanted)))
    report, seen = ConversionReport(STAGES), set[str]()
    for (where, source, row_seed), result in zip(wanted, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, source)
        elif result["question"] in seen:
            copy = Rejected("calculation", f"duplicate: seed {row_seed} draws the same numbers as an earlier seed")
            report.reject(where, copy, source)
        else:
            seen.add(result["question"])
            report.rows.append(result)
    if not report.rows:
        raise DataError(f"None of {len(wanted)} variants passes. The first reject: {report.rejects[:1]}")
    return report


def _processes(rows: int) -> Executor:
    # spawn, because a fork would inherit the sandbox's open files
    workers = max(1, min(len(os.sched_getaffinity(0)), rows))
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it


@guarded
def main(
    source: Annotated[Path, typer.Argument(help="GSM8K as JSON lines {question, answer}.")],
    *,
    out: Annotated[Path, typer.Option(help="JSON lines to write, in GSM8K's form.")],
    rejects: Rejects = None,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    draws: Annotated[int, typer.Option(min=1, help="Variants per problem, with SEED and the seeds after it.")] = 1,
) -> None:
    """Write variants of GSM8K's problems with large numbers, recalculated and executed."""
    check_output(out, JSON_LINES, [source])
    rows = rows_of(str(source), limit)

    async def run(on_row: Callable[[], None]) -> ConversionReport:
        # The weakest isolation level suffices, because the programs are only arithmetic.
        async with open_sandbox("local", min_level="rlimits") as sandbox:
            return await build(rows, sandbox, on_row, seed=seed, draws=draws)

    report = with_bar(run, len(rows) * draws)
    write_report(report, out, rejects)
    counts = Counter(str(reject["reason"]).partition(":")[0] for reject in report.rejects)
    echo("\n".join(f"{count} rejected: {reason}" for reason, count in counts.most_common()))


if __name__ == "__main__":
    typer.run(main)
