r"""Code-integrated traces from plain solutions: every calculation becomes a snippet and runs.

The source is GSM8K, whose solutions mark their calculations: ``48/2 = <<48/2=24>>24 clips``. The
marked expression is cut out and becomes a call, the sandbox's output becomes its result, and the
text goes on after it. A trace survives these stages:

- source: the solution marks at least one calculation, and its marks are whole;
- calculation: every snippet runs and prints what the solution states, to the last stated digit;
- format and answer: the two verifications of ``data.verify``. The answer is what the solution's own
  calculations or words arrive at (``_reached``), so a solution at odds with its answer line fails.
"""

import ast
import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from retool_mcore.data.chat import HERMES_MARKUP
from retool_mcore.data.programs import evaluate, plain_text, program_of
from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.data.tool import CODE_END, CODE_INTERPRETER, CODE_START, tool_call
from retool_mcore.data.verify import Rejected, Stage, VerifiedRows, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.reward.said import number_of
from retool_mcore.sandbox.base import Sandbox

STAGES: tuple[Stage, ...] = ("source", "calculation", "format", "answer")
GSM8K = "openai/gsm8k"
RUN_TIMEOUT_S = 10.0
ROWS_AT_ONCE = 16
BEFORE_PROGRAM = "I write the whole calculation as one program."
NO_CODE = ("```", CODE_START, CODE_END, *HERMES_MARKUP)  # markup of either protocol
Calls = Literal["each", "one", "none"]  # a call for each calculation, one for all, or words alone

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER_IN_TEXT = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


@dataclass(frozen=True)
class CalculationStep:
    """The text before a calculation, its code, and the value that the solution states for it."""

    text: str
    expression: str
    stated: Decimal

    @property
    def code(self) -> str:
        return f"print({self.expression})"


@dataclass(frozen=True)
class Solution:
    steps: tuple[CalculationStep, ...]
    rest: str  # the text after the last calculation, without the answer line
    truth: str
    body: str = ""  # the whole text with its marks, without the answer line


def parse_gsm8k(answer: str) -> Solution:
    """Cut a GSM8K solution at its calculations. Raises Rejected."""
    body, sign, truth = answer.rpartition("####")
    if not sign or not truth.strip():
        raise Rejected("source", "no answer line '#### ...'")
    steps: list[CalculationStep] = []
    start = 0
    for match in _MARK.finditer(body):
        try:
            stated = Decimal(match[2].replace(",", "").strip())
        except InvalidOperation as error:
            raise Rejected("source", f"the stated value {match[2]!r} is no number") from error
        steps.append(CalculationStep(body[start : match.start()].strip(), _expression(match[1]), stated))
        start = match.end()
    if not steps:
        raise Rejected("source", "no calculation is marked")
    rest = body[start:].strip()
    if "<<" in "".join([*(step.text for step in steps), rest]):
        raise Rejected("source", "a calculation mark is not whole")
    return Solution(tuple(steps), rest, truth.strip().replace(",", ""), body)


def _expression(expression: str) -> str:
    """An arithmetic expression of numbers as Python; anything else is refused, not run."""
    text = _LEADING_ZEROS.sub("", expression.strip())
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise Rejected("source", f"{expression!r} is no expression") from error
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise Rejected("source", f"{expression!r} is more than arithmetic")
    return text


def trace(question: str, solution: Solution, outputs: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a solution with its outputs; the box holds the solution's own result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": hermes_prompt(question)}]
    for step, output in zip(solution.steps, outputs, strict=True):
        call = tool_call(step.code)
        messages.append({"role": "assistant", "content": step.text, "tool_calls": [call]})
        messages.append({"role": "tool", "content": output})
    final = f"{solution.rest}\nThe answer is \\boxed{{{_reached(solution)}}}.".strip()
    return [*messages, {"role": "assistant", "content": final}]


def program_trace(question: str, code: str, output: str) -> list[dict[str, Any]]:
    """The messages of a solution as one program; the box holds what it printed."""
    printed = re.sub(r"(\.\d*?)0+\Z", r"\1", output).removesuffix(".")
    return [
        {"role": "user", "content": hermes_prompt(question)},
        {"role": "assistant", "content": BEFORE_PROGRAM, "tool_calls": [tool_call(code)]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": f"The answer is \\boxed{{{printed}}}."},
    ]


def text_trace(question: str, solution: Solution) -> list[dict[str, Any]]:
    """The messages of a solution in words alone, as a text-only run asks and answers.

    Its calculations are checked exactly. Raises Rejected.
    """
    for step in solution.steps:
        value = evaluate(step.expression)
        if not _close(Decimal(value.numerator) / Decimal(value.denominator), step.stated):
            raise Rejected("calculation", f"{step.expression} is not the {step.stated} that the solution states")
    final = f"{plain_text(solution.body)}\nThe answer is \\boxed{{{_reached(solution)}}}."
    return [{"role": "user", "content": hermes_prompt(question)}, {"role": "assistant", "content": final}]


def _reached(solution: Solution) -> str:
    """The solution's own result: the value of its last calculation, or the last number after it.

    Of the two it is the one that agrees with the answer line. When neither agrees, the trace boxes
    a wrong answer and fails.
    """
    last = f"{solution.steps[-1].stated:f}"
    named = [re.sub(r"[$,]", "", text) for text in _NUMBER_IN_TEXT.findall(solution.rest)][-1:]
    return next((text for text in (last, *named) if number_of(text) == number_of(solution.truth)), last)


def matches(output: str, stated: Decimal) -> bool:
    """Whether the output, rounded or cut off at the stated value's last digit, is that value."""
    try:
        value = Decimal(output)
    except InvalidOperation:
        return False
    return _close(value, stated)


def _close(value: Decimal, stated: Decimal) -> bool:
    exponent = stated.as_tuple().exponent
    assert isinstance(exponent, int), "stated values are finite"
    return abs(value - stated) < Decimal(1).scaleb(min(exponent, 0))


class Builder:
    """Builds rows in a sandbox; equal snippets run once. ``text`` adds each problem in words."""

    def __init__(self, sandbox: Sandbox, calls: Calls = "each", *, text: bool = False) -> None:
        self._sandbox, self._calls = sandbox, calls
        self._text = text or calls == "none"
        self._outputs: dict[str, asyncio.Task[str]] = {}

    async def rows(self, where: str, index: int, source: Mapping[str, Any]) -> list[dict[str, Any]]:
        """SFT rows of one problem with data_source, index and ground_truth: all of them, or none.

        Raises Rejected, DataError, SandboxUnavailable.
        """
        question, answer = source.get("question"), source.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(f"{where}: GSM8K rows have the texts question and answer; here: {', '.join(source)}")
        solution = parse_gsm8k(answer)
        made: list[tuple[list[dict[str, Any]], Any]] = []
        if self._calls == "each":
            outputs = [await self._run(step.code, step.stated) for step in solution.steps]
            made.append((trace(question, solution, outputs), [CODE_INTERPRETER]))
        elif self._calls == "one":
            made.append((await self._program(question, solution), [CODE_INTERPRETER]))
        if self._text:
            made.append((text_trace(question, solution), None))
        for messages, _ in made:
            if problem := format_problem(messages):
                raise Rejected("format", problem)
            if problem := await asyncio.to_thread(answer_problem, messages, solution.truth):
                raise Rejected("answer", problem)
        common = {"data_source": GSM8K, "index": index, "ground_truth": solution.truth}
        return [{"messages": messages, "tools": tools, **common} for messages, tools in made]

    async def _program(self, question: str, solution: Solution) -> list[dict[str, Any]]:
        program = program_of(question, solution.steps, solution.rest)
        for value, step in zip(program.values.values(), solution.steps, strict=True):
            if not _close(Decimal(value.numerator) / Decimal(value.denominator), step.stated):
                raise Rejected("calculation", f"{step.expression} is not the {step.stated} that the solution states")
        if found := next((mark for mark in NO_CODE if mark in program.code), None):
            raise Rejected("format", f"the program holds {found}")
        output = await self._run(program.code, solution.steps[-1].stated)
        return program_trace(question, program.code, output)

    async def _run(self, code: str, stated: Decimal) -> str:
        if code not in self._outputs:
            self._outputs[code] = asyncio.create_task(self._execute(code))
        output = await self._outputs[code]
        if not matches(output, stated):
            line = (output.splitlines() or ["nothing"])[-1]
            raise Rejected("calculation", f"{code:.200} gives {line:.120}, and the solution states {stated}")
        return output

    async def _execute(self, code: str) -> str:
        return (await self._sandbox.execute(code, run_timeout_s=RUN_TIMEOUT_S)).text


async def build_gsm8k(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    sandbox: Sandbox,
    on_row: Callable[[], None] = lambda: None,
    *,
    calls: Calls = "each",
    text: bool = False,
) -> VerifiedRows:
    """Build all rows (where, {question, answer}), in order; see ``Builder``.

    Raises DataError when a row has another schema.
    """
    builder = Builder(sandbox, calls, text=text)
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = VerifiedRows(STAGES)

    async def build(index: int, where: str, source: Mapping[str, Any]) -> list[dict[str, Any]] | Rejected:
        async with slots:
            try:
                return await builder.rows(where, index, source)
            except Rejected as rejected:
                return rejected
            finally:
                on_row()

    results = await asyncio.gather(*(build(index, *row) for index, row in enumerate(rows)))
    for (where, source), result in zip(rows, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, source)
            continue
        report.problems += 1
        for row in result:
            report.rows.append(row)
    if not report.rows:
        raise DataError(f"none of {len(rows)} solutions survived; the first reject: {report.rejects[:1]}")
    return report
