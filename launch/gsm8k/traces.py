r"""SFT rows from GSM8K: each problem as one program that runs, and in words alone.

    python launch/gsm8k/traces.py train.jsonl --part sft --out sft.parquet

A problem has both rows or neither. It survives these stages:

- source: the solution marks at least one calculation, and its marks are whole;
- calculation: the program prints what the solution states, to the last stated digit;
- format and answer: the two verifications of ``data.verify``. The answer is what the solution's own
  calculations or words arrive at (``_reached``), so a solution at odds with its answer line fails.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer
from solutions import Solution, evaluate, is_close, parse, program_of, require_stated

from retool_mcore.cli.common import guarded, output_named, with_bar
from retool_mcore.cli.data import PARQUET, Limit, Out, PartOption, Rejects, SftShare, rows_of, write_report
from retool_mcore.data.chat import HERMES_MARKUP
from retool_mcore.data.prompt_format import hermes_prompt
from retool_mcore.data.tool import CODE_END, CODE_INTERPRETER, CODE_START, tool_call
from retool_mcore.data.verify import Rejected, VerifiedRows, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.reward.statement import number_of
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox

STAGES = ("source", "calculation", "format", "answer")
GSM8K = "openai/gsm8k"
RUN_TIMEOUT_S = 10.0
ROWS_AT_ONCE = 16
BEFORE_PROGRAM = "I write the whole calculation as one program."
NO_CODE = ("```", CODE_START, CODE_END, *HERMES_MARKUP)  # markup of either protocol
_NUMBER_IN_TEXT = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


@guarded
def main(
    source: Annotated[Path, typer.Argument(help="GSM8K as JSON lines {question, answer}.")],
    *,
    out: Out,
    rejects: Rejects = None,
    limit: Limit = None,
    part: PartOption = None,
    sft_share: SftShare = 0.5,
) -> None:
    """Write each problem as one program that is run, and in words; verify format and answer."""
    output_named(out, PARQUET, [source])
    rows = rows_of(str(source), limit, part, sft_share)

    async def run(on_row: Callable[[], None]) -> VerifiedRows:
        # Any isolation level will do: the programs are arithmetic of numbers.
        async with open_sandbox("local", min_level="rlimits") as sandbox:
            return await build(rows, sandbox, on_row)

    write_report(with_bar(run, len(rows)), out, rejects)


async def build(
    rows: Sequence[tuple[str, Mapping[str, Any]]], sandbox: Sandbox, on_row: Callable[[], None] = lambda: None
) -> VerifiedRows:
    """Build rows from (where, {question, answer}), in order.

    Raises DataError when a row has another schema, or none survived.
    """
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = VerifiedRows(STAGES)

    async def built(index: int, where: str, source: Mapping[str, Any]) -> list[dict[str, Any]] | Rejected:
        async with slots:
            try:
                return await problem_rows(where, index, source, sandbox)
            except Rejected as rejected:
                return rejected
            finally:
                on_row()

    results = await asyncio.gather(*(built(index, *row) for index, row in enumerate(rows)))
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


async def problem_rows(where: str, index: int, source: Mapping[str, Any], sandbox: Sandbox) -> list[dict[str, Any]]:
    """The rows of one problem, with the tool and in words. Raises Rejected, DataError."""
    question, answer = texts_of(where, source)
    solution = parse(answer)
    made = [
        (await _with_program(question, solution, sandbox), [CODE_INTERPRETER]),
        (_in_words(question, solution), None),
    ]
    for messages, _ in made:
        if problem := format_problem(messages):
            raise Rejected("format", problem)
        if problem := await asyncio.to_thread(answer_problem, messages, solution.truth):
            raise Rejected("answer", problem)
    common = {"data_source": GSM8K, "index": index, "ground_truth": solution.truth}
    return [{"messages": messages, "tools": tools, **common} for messages, tools in made]


def texts_of(where: str, source: Mapping[str, Any]) -> tuple[str, str]:
    """Question and answer of a row. Raises DataError for another schema."""
    question, answer = source.get("question"), source.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"{where}: GSM8K rows have the texts question and answer; here: {', '.join(source)}")
    return question, answer


async def _with_program(question: str, solution: Solution, sandbox: Sandbox) -> list[dict[str, Any]]:
    """The messages with one program; the box has what it printed."""
    code = program_of(question, solution)
    if found := next((mark for mark in NO_CODE if mark in code), None):
        raise Rejected("format", f"the program holds {found}")
    output = (await sandbox.execute(code, run_timeout_s=RUN_TIMEOUT_S)).text
    if not matches(output, stated := solution.steps[-1].stated):
        line = (output.splitlines() or ["nothing"])[-1]
        raise Rejected("calculation", f"{code:.200} gives {line:.120}, and the solution states {stated}")
    printed = re.sub(r"(\.\d*?)0+\Z", r"\1", output).removesuffix(".")
    return [
        {"role": "user", "content": hermes_prompt(question)},
        {"role": "assistant", "content": BEFORE_PROGRAM, "tool_calls": [tool_call(code)]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": f"The answer is \\boxed{{{printed}}}."},
    ]


def matches(output: str, stated: Decimal) -> bool:
    """Whether the output is the stated value, rounded or cut off at its last digit."""
    try:
        return is_close(Decimal(output), stated)
    except InvalidOperation:
        return False


def _in_words(question: str, solution: Solution) -> list[dict[str, Any]]:
    """The messages in words alone, as a run without tools asks and answers. Raises Rejected."""
    for step in solution.steps:
        require_stated(step, evaluate(step.expression))
    final = f"{solution.text}\nThe answer is \\boxed{{{_reached(solution)}}}."
    return [{"role": "user", "content": hermes_prompt(question)}, {"role": "assistant", "content": final}]


def _reached(solution: Solution) -> str:
    """The solution's own result: the value of its last calculation, or the last number after it.

    Of the two it is the one that agrees with the answer line. When neither agrees, the row boxes a
    wrong answer and fails.
    """
    last = f"{solution.steps[-1].stated:f}"
    named = [re.sub(r"[$,]", "", text) for text in _NUMBER_IN_TEXT.findall(solution.rest)][-1:]
    return next((text for text in (last, *named) if number_of(text) == number_of(solution.truth)), last)


if __name__ == "__main__":
    typer.run(main)
