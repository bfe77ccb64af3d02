r"""Makes SFT rows from GSM8K: each problem once with a program, and once as text.

    python launch/gsm8k/traces.py train.jsonl --part sft --out sft.parquet

A problem gets both rows or none. It has to pass these stages:

- source: the solution marks at least one calculation, and its marks are complete.
- calculation: the program prints the stated value, to the last stated digit.
- format and answer: the two checks of ``data.verify``. The answer is the result of the solution's
  own calculations or text (``_result``), so a solution that contradicts its answer line fails.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer
from solutions import Solution, evaluate, is_close, parse, program_of, require_stated

from retool_mcore.cli.common import check_output, guarded, with_bar
from retool_mcore.cli.data import PARQUET, Limit, Out, PartOption, Rejects, SftShare, rows_of, write_report
from retool_mcore.data.chat import HERMES_MARKUP
from retool_mcore.data.prompt_format import hermes_prompt
from retool_mcore.data.tool import CODE_END, CODE_INTERPRETER, CODE_START, tool_call
from retool_mcore.data.verify import ConversionReport, Rejected, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.reward.statement import number_of
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Sandbox

STAGES = ("source", "calculation", "format", "answer")
GSM8K = "openai/gsm8k"
RUN_TIMEOUT_S = 10.0
ROWS_AT_ONCE = 16
BEFORE_PROGRAM = "I write the whole calculation as one program."
MARKUP = ("```", CODE_START, CODE_END, *HERMES_MARKUP)  # of both protocols; not allowed in programs
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
    """Write each problem with an executed program, and as text. Verify format and answer."""
    check_output(out, PARQUET, [source])
    rows = rows_of(str(source), limit, part, sft_share)

    async def run(on_row: Callable[[], None]) -> ConversionReport:
        # The weakest isolation level suffices, because the programs are only arithmetic.
        async with open_sandbox("local", min_level="rlimits") as sandbox:
            return await build(rows, sandbox, on_row)

    write_report(with_bar(run, len(rows)), out, rejects)


async def build(
    rows: Sequence[tuple[str, Mapping[str, Any]]], sandbox: Sandbox, on_row: Callable[[], None] = lambda: None
) -> ConversionReport:
    """Build rows from (where, {question, answer}), in order.

    Raises DataError if a row has another schema, or if no problem passes.
    """
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = ConversionReport(STAGES)

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
        raise DataError(f"None of {len(rows)} solutions passes. The first reject: {report.rejects[:1]}")
    return report


async def problem_rows(where: str, index: int, source: Mapping[str, Any], sandbox: Sandbox) -> list[dict[str, Any]]:
    """The rows of one problem, with the tool and as text. Raises Rejected or DataError."""
    question, answer = texts_of(where, source)
    solution = parse(answer)
    made = [
        (await _with_program(question, solution, sandbox), [CODE_INTERPRETER]),
        (_as_text(question, solution), None),
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
        raise DataError(f"{where}: a GSM8K row needs the texts question and answer, but has {', '.join(source)}.")
    return question, answer


async def _with_program(question: str, solution: Solution, sandbox: Sandbox) -> list[dict[str, Any]]:
    """The messages with one program, whose output is the boxed answer."""
    code = program_of(question, solution)
    if found := next((mark for mark in MARKUP if mark in code), None):
        raise Rejected("format", f"the program contains {found}")
    output = (await sandbox.execute(code, run_timeout_s=RUN_TIMEOUT_S)).text
    if not matches(output, stated := solution.steps[-1].stated):
        line = (output.splitlines() or ["nothing"])[-1]
        raise Rejected("calculation", f"{code:.200} prints {line:.120}, but the solution states {stated}")
    printed = re.sub(r"(\.\d*?)0+\Z", r"\1", output).removesuffix(".")
    return [
        {"role": "user", "content": hermes_prompt(question)},
        {"role": "assistant", "content": BEFORE_PROGRAM, "tool_calls": [tool_call(code)]},
        {"role": "tool", "content": output},
        {"role": "assistant", "content": f"The answer is \\boxed{{{printed}}}."},
    ]


def matches(output: str, stated: Decimal) -> bool:
    """Whether the output is the stated value, rounded or truncated at its last digit."""
    try:
        return is_close(Decimal(output), stated)
    except InvalidOperation:
        return False


def _as_text(question: str, solution: Solution) -> list[dict[str, Any]]:
    """The messages of a run without tools. Raises Rejected."""
    for step in solution.steps:
        require_stated(step, evaluate(step.expression))
    final = f"{solution.text}\nThe answer is \\boxed{{{_result(solution)}}}."
    return [{"role": "user", "content": hermes_prompt(question)}, {"role": "assistant", "content": final}]


def _result(solution: Solution) -> str:
    """The solution's result: the value of its last calculation, or the last number after it.

    Returns whichever agrees with the answer line. If neither agrees, returns the calculation's
    value, and the row fails its answer check.
    """
    last = f"{solution.steps[-1].stated:f}"
    named = [re.sub(r"[$,]", "", text) for text in _NUMBER_IN_TEXT.findall(solution.rest)][-1:]
    return next((text for text in (last, *named) if number_of(text) == number_of(solution.truth)), last)


if __name__ == "__main__":
    typer.run(main)
