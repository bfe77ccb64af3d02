r"""Turn ReTool's SFT data, raw or converted, into the parquet that training reads.

Raw rows hold the whole trace in one assistant text: ``<code>\n```python ...\n```\n</code>``, its
output in ``<interpreter>``, the end in ``<answer>``. Converted rows hold messages with tool calls.
Both are read into the same trace, verified (format, then answer if the truth is known, then
execution if requested), and written in the form of either protocol.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.conversations import OPTION
from retool_mcore.data.layouts import example, truth_text
from retool_mcore.data.prompts import QUESTION_MARK, hermes_prompt, retool_prompt
from retool_mcore.data.tool import CALL_END, CODE_END, CODE_INTERPRETER, tool_call
from retool_mcore.data.verify import Rejected, Stage, VerifiedRows, answer_problem, final_answer_problem, format_problem
from retool_mcore.data.wrappers import problem_of
from retool_mcore.errors import DataError
from retool_mcore.sandbox.base import Sandbox

ProtocolName = Literal["hermes", "qwen3_coder", "retool", "llama3", "mistral"]
STAGES: tuple[Stage, ...] = ("source", "format", "answer", "execution")
RUN_TIMEOUT_S = 30.0
ROWS_AT_ONCE = 16
ROWS_IN_MEMORY = 1024
REMEDIES: Mapping[Stage, str] = {
    "source": OPTION,
    "format": "A trace is a question, calls with their results, and one boxed answer at the end",
    "answer": "--truth names the column of the ground truth; without it answers are not verified",
    "execution": "Without --execute snippets are not run again",
}

_TAG = re.compile(r"<(/?)(code|interpreter|answer)>")
_OUTPUT = re.compile(r"^[ \t]*```output\b", re.MULTILINE)
_RUN = re.compile(  # code in a fence, and behind it what it printed
    r"^[ \t]*```(?:python|py)[ \t]*\n((?:(?![ \t]*```)[^\n]*+\n)*+)[ \t]*```[ \t]*\n\s*+"
    r"```output[ \t]*\n((?:(?![ \t]*```)[^\n]*+\n)*+)[ \t]*```[ \t]*$",
    re.MULTILINE,
)
_FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class CallStep:
    """The text before a call, its code, and the output shown for it."""

    text: str
    code: str
    output: str


@dataclass(frozen=True)
class Trace:
    """A conversation in no protocol's form. ``prompt`` is the user's turn as the data has it.

    All protocols but "retool" have one form of messages; the template writes their calls.
    """

    prompt: str
    steps: tuple[CallStep, ...]
    final: str  # the closing words; may hold <answer> tags

    def messages(self, protocol: ProtocolName) -> list[dict[str, Any]]:
        return self._retool() if protocol == "retool" else self._hermes()

    def _hermes(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": hermes_prompt(problem_of(self.prompt))}]
        for step in self.steps:
            call = tool_call(step.code)
            messages.append({"role": "assistant", "content": step.text, "tool_calls": [call]})
            messages.append({"role": "tool", "content": step.output})
        final = re.sub(r"\s*</?answer>\s*", "\n", self.final).strip()
        return [*messages, {"role": "assistant", "content": final}]

    def _retool(self) -> list[dict[str, Any]]:
        parts = [
            f"{step.text}\n<code>\n```python\n{step.code}\n```\n</code>\n<interpreter>\n{step.output}\n</interpreter>"
            for step in self.steps
        ]
        final = self.final
        if "<answer>" not in final and "\\boxed" in final:
            before, _, box = final.rpartition("\\boxed")
            final = f"{before.rstrip()}\n<answer>\n\\boxed{box.strip().rstrip('.')}\n</answer>"
        text = "\n".join([*parts, final]).strip()
        return [
            {"role": "user", "content": retool_prompt(problem_of(self.prompt))},
            {"role": "assistant", "content": text},
        ]


def read_trace(messages: Any) -> Trace:
    """Read the messages of a raw or converted row. Raises Rejected when they have another form."""
    if isinstance(messages, str):
        messages = _json(messages)
    if not is_tables(messages):
        raise Rejected("source", f"messages is {type(messages).__name__}, not a list of messages")
    turns = [message for message in messages if message.get("role") != "system"]
    if strange := [calls for turn in turns if not isinstance(calls := turn.get("tool_calls") or [], Sequence)]:
        raise Rejected("source", f"a message has tool_calls = {strange[0]!r:.80}, which is no list")
    texts = [_content(message) for message in turns]
    roles = [message.get("role") for message in turns]
    if roles == ["user", "assistant"] and not turns[1].get("tool_calls"):
        steps, final = read_inline(texts[1])
        return Trace(texts[0], steps, final)
    return _read_converted(turns, texts)


def _content(message: Mapping[str, Any]) -> str:
    """A message's text, behind the thoughts that some put beside it."""
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise Rejected("source", "the content of a message is no text")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts is None or message.get("role") != "assistant":
        return content or ""
    if not isinstance(thoughts, str):
        raise Rejected("source", "the reasoning_content of a message is no text")
    return f"<think>\n{thoughts.strip()}\n</think>\n\n{content or ''}".rstrip() if thoughts.strip() else content or ""


def end_tag_problem(steps: Sequence[CallStep], protocol: ProtocolName) -> str | None:
    """What a rollout of the protocol would cut: a call ends at the first tag that ends calls."""
    tag = {"hermes": CALL_END, "qwen3_coder": CALL_END, "retool": CODE_END}.get(protocol)
    number = next((number for number, step in enumerate(steps, start=1) if tag and tag in step.code), None)
    if number is None:
        return None
    return f"the code of call {number} holds {tag}, where a rollout would end the call"


def read_inline(text: str) -> tuple[tuple[CallStep, ...], str]:
    """Steps and closing words of a raw trace. Raises Rejected("format") for tags out of order."""
    if not _TAG.search(text) and _OUTPUT.search(text):
        return _read_fenced(text)
    steps: list[CallStep] = []
    pending: tuple[str, str] | None = None  # text and code that wait for their output
    start, opened, answers = 0, None, 0
    said = ""
    for tag in _TAG.finditer(text):
        closing, name = bool(tag[1]), tag[2]
        inside = text[start : tag.start()]
        if closing != (opened is not None) or (closing and name != opened):
            raise Rejected("format", f"{tag[0]} is out of place")
        if not closing:
            if pending is not None and (name != "interpreter" or inside.strip()):
                raise Rejected("format", "a <code> block is not followed by its <interpreter> block")
            if pending is None and name == "interpreter":
                raise Rejected("format", "an <interpreter> block without <code> before it")
            if answers:
                raise Rejected("format", f"{tag[0]} after the <answer>")
            said = said if name == "interpreter" else inside.strip()
            opened, start = name, tag.end()
            continue
        if name == "code":
            pending = (said, _unfenced(inside))
        elif name == "interpreter":
            assert pending is not None, "opening it required a pending call"
            steps.append(CallStep(*pending, inside.strip("\n")))
            pending = None
        else:
            answers += 1
            answer_start = start - len("<answer>")
            said = f"{said}\n{text[answer_start : tag.end()]}".strip()
        opened, start = None, tag.end()
    if opened is not None or pending is not None:
        raise Rejected("format", f"<{opened}> is not closed" if opened else "the last <code> block has no output")
    rest = text[start:].strip()
    return tuple(steps), f"{said}\n{rest}".strip() if answers else rest


def _read_fenced(text: str) -> tuple[tuple[CallStep, ...], str]:
    """Steps of a trace in Markdown, as NuminaMath-TIR has it: code in a fence, then its output."""
    steps: list[CallStep] = []
    start = 0
    for block in _RUN.finditer(text):
        steps.append(CallStep(text[start : block.start()].strip(), block[1].strip("\n"), block[2].strip("\n")))
        start = block.end()
    rest = "".join(step.text for step in steps) + text[start:]
    if _OUTPUT.search(rest):
        raise Rejected("format", "an ```output block is not behind its ```python block")
    return tuple(steps), text[start:].strip()


def _unfenced(code: str) -> str:
    fence = _FENCE.match(code)
    return fence[1] if fence else code.strip("\n")


def _read_converted(turns: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Trace:
    if problem := format_problem([{**turn, "content": text} for turn, text in zip(turns, texts, strict=True)]):
        raise Rejected("format", problem)
    steps: list[CallStep] = []
    for position, turn in enumerate(turns):
        for number, call in enumerate(turn.get("tool_calls") or []):
            steps.append(CallStep("" if number else texts[position], _code_of(call), texts[position + 1 + number]))
    return Trace(texts[0], tuple(steps), texts[-1])


def _code_of(call: Any) -> str:
    function = call.get("function") if is_table(call) else None
    arguments = function.get("arguments") if is_table(function) else None
    if isinstance(arguments, str):
        arguments = _json(arguments)
    code = arguments.get("code") if is_table(arguments) else None
    if not isinstance(code, str):
        raise Rejected("source", f"a tool call without code: {call!r:.200}")
    return code


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Rejected("source", f"not JSON: {error}") from error


@dataclass(frozen=True)
class Conversion:
    """How rows are converted. ``truth`` names the column of the ground truth; "": there is none."""

    protocol: ProtocolName = "hermes"
    truth: str = ""
    sandbox: Sandbox | None = None  # re-executes every snippet and compares its output

    @property
    def stages(self) -> tuple[Stage, ...]:
        skipped = {"answer": not self.truth, "execution": self.sandbox is None}
        return tuple(stage for stage in STAGES if not skipped.get(stage))

    async def row(self, where: str, source: Mapping[str, Any]) -> dict[str, Any]:
        """Convert one row. Raises Rejected, and DataError when a column is missing."""
        trace = read_trace(source["messages"])
        if problem := final_answer_problem(trace.final):
            raise Rejected("format", problem)
        hermes = trace.messages("hermes")
        if problem := format_problem(hermes):
            raise Rejected("format", problem)
        if problem := end_tag_problem(trace.steps, self.protocol):
            raise Rejected("format", problem)
        row: dict[str, Any] = {}
        if self.truth:
            if self.truth not in source:
                raise DataError(
                    f"{where}: no column {self.truth}; it has {', '.join(source)}. --truth names the column of the "
                    "ground truth; without it answers are not verified"
                )
            try:
                truth = truth_text(source[self.truth], f"column {self.truth}")
            except DataError as error:
                raise Rejected("answer", str(error)) from error
            if problem := await asyncio.to_thread(answer_problem, hermes, truth):
                raise Rejected("answer", problem)
            row["ground_truth"] = truth
        await self._execute(trace)
        if not trace.steps and "tools" in source and not source["tools"] and QUESTION_MARK not in trace.prompt:
            return {"messages": hermes, "tools": None, **row}  # a row in words alone, which no tool is offered to
        inline = self.protocol == "retool"
        messages = trace.messages(self.protocol) if inline else hermes
        return {"messages": messages, "tools": None if inline else [CODE_INTERPRETER], **row}

    async def _execute(self, trace: Trace) -> None:
        for number, step in enumerate(trace.steps if self.sandbox else (), start=1):
            assert self.sandbox is not None, "no steps without a sandbox"
            result = await self.sandbox.execute(step.code, run_timeout_s=RUN_TIMEOUT_S)
            if result.text.split() != step.output.split():
                raise Rejected(
                    "execution", f"call {number} prints {result.text!r:.120}, and the trace shows {step.output!r:.120}"
                )


async def convert_sft(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    conversion: Conversion,
    on_row: Callable[[], None] = lambda: None,
    *,
    bad: Sequence[tuple[str, DataError]] = (),
) -> VerifiedRows:
    """Convert rows (where, {messages, ...}), in order; ``bad`` are unreadable rows (where, why)."""
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = VerifiedRows(conversion.stages)
    for where, error in bad:
        report.reject(where, Rejected("source", str(error)), {})

    async def convert(where: str, source: Mapping[str, Any]) -> dict[str, Any] | Rejected:
        async with slots:
            try:
                return await conversion.row(where, source)
            except Rejected as rejected:
                return rejected
            finally:
                on_row()

    for start in range(0, len(rows), ROWS_IN_MEMORY):
        part = rows[start : start + ROWS_IN_MEMORY]
        results = await asyncio.gather(*(convert(where, source) for where, source in part))
        for (where, source), result in zip(part, results, strict=True):
            if isinstance(result, Rejected):
                report.reject(where, result, {"messages": source["messages"]})
            else:
                report.rows.append(result)
    if not report.rows:
        if not report.rejects:
            raise DataError("there are no rows to convert")
        raise DataError(_nothing_left(report, rows))
    return report


def _nothing_left(report: VerifiedRows, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Why no row survived: the first reject, the columns that were seen, and what helps."""
    first = report.rejects[0]
    place = "" if first["reason"].startswith(first["where"]) else f"{first['where']}: "
    told = f"none of {len(report.rejects)} rows survived; the first: {place}{first['reason']}"
    if rows:
        told += f". Its columns: {', '.join(rows[0][1])}. A row: {example(rows[0][1])}"
    return f"{told}. {REMEDIES[first['stage']]}"
