r"""Code-integrated traces from plain solutions: every calculation becomes a snippet and runs.

The source is GSM8K, whose solutions mark their calculations: ``48/2 = <<48/2=24>>24 clips``. The
marked expression is cut out and becomes a call, the sandbox's output becomes its result, and the
text goes on after it. A trace survives these stages:

- source: the solution marks at least one calculation, and its marks are whole;
- calculation: every snippet runs and prints what the solution states, to the last stated digit;
- format and answer: the two verifications of ``data.verify``. The answer is what the solution's own
  calculations or words arrive at (``_reached``), so a solution at odds with its answer line fails.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from retool_mcore.data.prompts import hermes_prompt
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.data.verify import Rejected, Report, Stage, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.reward.normalise import normalise
from retool_mcore.sandbox.base import Sandbox

STAGES: tuple[Stage, ...] = ("source", "calculation", "format", "answer")
GSM8K = "openai/gsm8k"
RUN_TIMEOUT_S = 10.0
ROWS_AT_ONCE = 16

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER_IN_TEXT = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


@dataclass(frozen=True)
class Step:
    """The text before a calculation, its code, and the value that the solution states for it."""

    text: str
    code: str
    stated: Decimal


@dataclass(frozen=True)
class Solution:
    steps: tuple[Step, ...]
    rest: str  # the text after the last calculation, without the answer line
    truth: str


def parse_gsm8k(answer: str) -> Solution:
    """Cut a GSM8K solution at its calculations. Raises Rejected."""
    body, sign, truth = answer.rpartition("####")
    if not sign or not truth.strip():
        raise Rejected("source", "no answer line '#### ...'")
    steps: list[Step] = []
    start = 0
    for match in _MARK.finditer(body):
        try:
            stated = Decimal(match[2].replace(",", "").strip())
        except InvalidOperation as error:
            raise Rejected("source", f"the stated value {match[2]!r} is no number") from error
        steps.append(Step(body[start : match.start()].strip(), _code(match[1]), stated))
        start = match.end()
    if not steps:
        raise Rejected("source", "no calculation is marked")
    rest = body[start:].strip()
    if "<<" in "".join([*(step.text for step in steps), rest]):
        raise Rejected("source", "a calculation mark is not whole")
    return Solution(tuple(steps), rest, truth.strip().replace(",", ""))


def _code(expression: str) -> str:
    """A snippet for an arithmetic expression of numbers; anything else is refused, not run."""
    text = _LEADING_ZEROS.sub("", expression.strip())
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise Rejected("source", f"{expression!r} is no expression") from error
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise Rejected("source", f"{expression!r} is more than arithmetic")
    return f"print({text})"


def trace(question: str, solution: Solution, outputs: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a solution with its outputs; the box holds the solution's own result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": hermes_prompt(question)}]
    for step, output in zip(solution.steps, outputs, strict=True):
        call = tool_call(step.code)
        messages.append({"role": "assistant", "content": step.text, "tool_calls": [call]})
        messages.append({"role": "tool", "content": output})
    final = f"{solution.rest}\nThe answer is \\boxed{{{_reached(solution)}}}.".strip()
    return [*messages, {"role": "assistant", "content": final}]


def _reached(solution: Solution) -> str:
    """The solution's own result: the value of its last calculation, or the last number after it.

    Of the two it is the one that agrees with the answer line. When neither agrees, the trace boxes
    a wrong answer and fails.
    """
    last = f"{solution.steps[-1].stated:f}"
    named = [re.sub(r"[$,]", "", text) for text in _NUMBER_IN_TEXT.findall(solution.rest)][-1:]
    return next((text for text in (last, *named) if normalise(text).number == normalise(solution.truth).number), last)


def matches(output: str, stated: Decimal) -> bool:
    """Whether the output, rounded or cut off at the stated value's last digit, is that value."""
    try:
        value = Decimal(output)
    except InvalidOperation:
        return False
    exponent = stated.as_tuple().exponent
    assert isinstance(exponent, int), "stated values are finite"
    return abs(value - stated) < Decimal(1).scaleb(min(exponent, 0))


class Builder:
    """Builds rows in a sandbox; equal snippets run once."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._outputs: dict[str, asyncio.Task[str]] = {}

    async def row(self, where: str, index: int, source: Mapping[str, Any]) -> dict[str, Any]:
        """An SFT row with data_source, index and ground_truth.

        Raises Rejected, DataError, SandboxUnavailable.
        """
        question, answer = source.get("question"), source.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DataError(f"{where}: GSM8K rows have the texts question and answer; here: {', '.join(source)}")
        solution = parse_gsm8k(answer)
        outputs = [await self._run(step) for step in solution.steps]
        messages = trace(question, solution, outputs)
        if problem := format_problem(messages):
            raise Rejected("format", problem)
        if problem := await asyncio.to_thread(answer_problem, messages, solution.truth):
            raise Rejected("answer", problem)
        return {
            "messages": messages,
            "tools": [CODE_INTERPRETER],
            "data_source": GSM8K,
            "index": index,
            "ground_truth": solution.truth,
        }

    async def _run(self, step: Step) -> str:
        if step.code not in self._outputs:
            self._outputs[step.code] = asyncio.create_task(self._execute(step.code))
        output = await self._outputs[step.code]
        if not matches(output, step.stated):
            line = (output.splitlines() or ["nothing"])[-1]
            raise Rejected("calculation", f"{step.code} gives {line:.120}, and the solution states {step.stated}")
        return output

    async def _execute(self, code: str) -> str:
        return (await self._sandbox.execute(code, run_timeout_s=RUN_TIMEOUT_S)).text


async def build_gsm8k(
    rows: Sequence[tuple[str, Mapping[str, Any]]], sandbox: Sandbox, on_row: Callable[[], None] = lambda: None
) -> Report:
    """Build all rows (where, {question, answer}), in order.

    Raises DataError when a row has another schema.
    """
    builder = Builder(sandbox)
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = Report(STAGES)

    async def build(index: int, where: str, source: Mapping[str, Any]) -> dict[str, Any] | Rejected:
        async with slots:
            try:
                return await builder.row(where, index, source)
            except Rejected as rejected:
                return rejected
            finally:
                on_row()

    results = await asyncio.gather(*(build(index, *row) for index, row in enumerate(rows)))
    for (where, source), result in zip(rows, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, source)
        else:
            report.rows.append(result)
    if not report.rows:
        raise DataError(f"none of {len(rows)} solutions survived; the first reject: {report.rejects[:1]}")
    return report
