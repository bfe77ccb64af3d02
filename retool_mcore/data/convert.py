r"""Converts SFT traces with tool calls into the parquet files that SFT reads.

Input formats:
- Raw ReTool rows: one assistant text contains the whole trace, with code in
  ``<code>\n```python ...\n```\n</code>``, output in ``<interpreter>`` and the end in ``<answer>``.
- OpenAI messages with calls of the interpreter, or of tools in the row's ``tools`` column.
- ShareGPT: turns are {from, value}. A call is a ``function_call`` turn (JSON), or is between
  ``<tool_call>`` tags in the assistant's text.

Every row becomes OpenAI messages and is verified: first its format, then its answer if the ground
truth is known, then its execution if requested. The output follows the chosen protocol's format.
``Conversion.notes`` counts the changes.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from retool_mcore.config.base import is_tables
from retool_mcore.data.chat import normalised_call, normalised_messages, parse_tools
from retool_mcore.data.layouts import example, truth_text
from retool_mcore.data.prompt_format import OURS, QUESTION_HEADER, hermes_prompt, problem_of, retool_prompt, unwrap
from retool_mcore.data.tool import CALL_END, CODE_END, CODE_INTERPRETER, TOOL_NAME, tool_call
from retool_mcore.data.verify import ConversionReport, Rejected, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.sandbox.base import Sandbox

COLUMNS = ("messages", "conversations")
OPTION = "--messages names the column of the conversation: a list of {role, content} or of {from, value}"
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def conversations(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    column: str = "",
    on_bad: Callable[[str, DataError], None] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows (where, row) with their conversation in ``messages``.

    Raises DataError for a row without ``column``, or without any of COLUMNS. With ``on_bad``,
    passes such rows to it instead.
    """
    names = (column,) if column else COLUMNS
    for where, row in rows:
        name = next((name for name in names if name in row), None)
        if name is None:
            error = DataError(
                f"{where}: no column {' or '.join(names)}; it has {', '.join(row) or 'none'}. The row: {example(row)}. "
                f"{OPTION}"
            )
            if on_bad is None:
                raise error
            on_bad(where, error)
            continue
        yield where, {**row, "messages": row[name]}


def _from_sharegpt(turn: Mapping[str, Any]) -> dict[str, Any]:
    sender, text = turn["from"], turn["value"]
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = ROLES.get(sender, sender) if isinstance(sender, str) else sender
    if not isinstance(text, str):
        return {**rest, "role": role, "content": text}
    if sender == "function_call":
        return {**rest, "role": role, "content": "", "tool_calls": _calls(text)}
    if role == "assistant" and (matches := list(_CALL.finditer(text))):
        after = text[matches[-1].end() :].strip()
        calls = [call for match in matches for call in _calls(match[1])]
        outside = f"{text[: matches[0].start()].strip()}\n{after}".strip()
        return {**rest, "role": role, "content": outside, "tool_calls": calls}
    if role == "tool":
        text = re.sub(r"</?tool_response>", "", text).strip()
    return {**rest, "role": role, "content": text}


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls in a JSON text: one object, or a list.

    Invalid JSON yields a call that the conversion rejects later.
    """
    try:
        decoded: object = json.loads(text)
    except ValueError:
        decoded = text
    calls = cast("list[object]", decoded) if isinstance(decoded, list) else [decoded]
    return [{"type": "function", "function": call} for call in calls]


def _joined(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge an assistant's text with a call in the assistant turn that follows it."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        before = joined[-1] if joined else {}
        text_only = before.get("role") == "assistant" and not before.get("tool_calls")
        if text_only and turn.get("tool_calls") and not turn["content"]:
            joined[-1] = {**before, **turn, "content": before["content"]}
        else:
            joined.append(turn)
    return joined


ProtocolName = Literal["hermes", "qwen3_coder", "retool", "llama3", "mistral"]
STAGES = ("source", "format", "answer", "execution")
RUN_TIMEOUT_S = 30.0
ROWS_AT_ONCE = 16
REMEDIES = {
    "source": OPTION,
    "format": "A row is a question, calls with their results, and one boxed answer at the end (--no-box: any answer)",
    "answer": "--truth names the column of the ground truth; without it answers are not verified",
    "execution": "Without --execute, snippets are not executed again",
}

_TAG = re.compile(r"</?(?:code|interpreter|answer)>")
_TAGGED_RUN = re.compile(r"<code>((?:(?!</?code>).)*+)</code>\s*<interpreter>(.*?)</interpreter>", re.DOTALL)
_ANSWER = re.compile(r"<answer>.*?</answer>", re.DOTALL)
_OUTPUT_FENCE = re.compile(r"^[ \t]*```output\b", re.MULTILINE)
_FENCED_RUN = re.compile(  # a code fence followed by an output fence
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


def read_turns(messages: Any) -> list[dict[str, Any]]:
    """Normalise the turns of a row; put reasoning in <think> tags before an assistant's text.

    ``messages``: OpenAI's messages or ShareGPT's turns, possibly as JSON text. Raises DataError for
    any other value, or for unsupported keys.
    """
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise DataError(f"messages is not JSON: {error}") from error
    if not is_tables(messages) or not messages:
        raise DataError(f"messages is {messages!r:.80}, not a list of messages")
    if all("from" in turn and "value" in turn for turn in messages):
        messages = _joined([_from_sharegpt(turn) for turn in messages])
    turns = normalised_messages(messages)
    for turn in turns:
        calls = turn.setdefault("tool_calls", [])
        if not isinstance(calls, list):
            raise DataError(f"a message has tool_calls = {calls!r:.80}, which is not a list")
        if not isinstance(content := turn.setdefault("content", ""), str):
            raise DataError("the content of a message is not text")
        if thoughts := turn.pop("reasoning_content", "").strip():
            turn["content"] = f"<think>\n{thoughts}\n</think>\n\n{content}".rstrip()
        if not calls:
            del turn["tool_calls"]
    return turns


def expanded(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a raw trace, one assistant text, into separate turns for its calls and results.

    Returns other conversations unchanged. Raises Rejected("format") for tags out of order.
    """
    dialogue = [turn for turn in turns if turn["role"] != "system"]
    if [turn["role"] for turn in dialogue] != ["user", "assistant"] or dialogue[1].get("tool_calls"):
        return list(turns)
    steps, final = read_inline(dialogue[1]["content"])
    expanded_turns: list[dict[str, Any]] = list(turns[: turns.index(dialogue[1])])
    for step in steps:
        expanded_turns.append({**dialogue[1], "content": step.text, "tool_calls": [tool_call(step.code)]})
        expanded_turns.append({"role": "tool", "content": step.output})
    return [*expanded_turns, {**dialogue[1], "content": final}]


def inline(turns: Sequence[Mapping[str, Any]], final: str) -> list[dict[str, Any]]:
    """Join a conversation into the paper's inline format: a single assistant text.

    ``final``: the text after the last result; it may already contain <answer> tags.
    """
    parts = list[str]()
    for index, turn in enumerate(turns):
        results = iter(turns[index + 1 :])
        for number, call in enumerate(turn.get("tool_calls") or ()):
            text, code, output = "" if number else turn["content"], code_of(call), next(results)["content"]
            parts.append(f"{text}\n<code>\n```python\n{code}\n```\n</code>\n<interpreter>\n{output}\n</interpreter>")
    if "<answer>" not in final and "\\boxed" in final:
        before, _, box = final.rpartition("\\boxed")
        final = f"{before.rstrip()}\n<answer>\n\\boxed{box.strip().rstrip('.')}\n</answer>"
    prompt = [dict(turn) for turn in turns if turn["role"] in ("system", "user")]
    weight = {"weight": turns[-1]["weight"]} if "weight" in turns[-1] else {}
    return [*prompt, {"role": "assistant", "content": "\n".join([*parts, final]).strip(), **weight}]


def end_tag_problem(calls: Sequence[Mapping[str, Any]], protocol: ProtocolName) -> str | None:
    """The error if a call's arguments contain the protocol's end tag, else None.

    A rollout would cut such a call at that tag.
    """
    tag = {"hermes": CALL_END, "qwen3_coder": CALL_END, "retool": CODE_END}.get(protocol)
    for number, call in enumerate(calls, start=1):
        if tag and any(tag in str(value) for value in call["function"]["arguments"].values()):
            return f"the arguments of call {number} contain {tag}, which would end the call in a rollout"
    return None


def read_inline(text: str) -> tuple[tuple[CallStep, ...], str]:
    """The steps and the final text of a raw trace: ReTool's tags, or Markdown (NuminaMath-TIR).

    Raises Rejected("format") for a call without output, or an output without its call.
    """
    markdown = not _TAG.search(text)
    block, stray = (_FENCED_RUN, _OUTPUT_FENCE) if markdown else (_TAGGED_RUN, _TAG)
    steps: list[CallStep] = []
    start = 0
    for run in block.finditer(text):
        steps.append(CallStep(text[start : run.start()].strip(), _unfenced(run[1]), run[2].strip("\n")))
        start = run.end()
    final = text[start:].strip()
    outside = [*(step.text for step in steps), final if markdown else _ANSWER.sub("", final, count=1)]
    if tag := next((match[0].strip() for text in outside if (match := stray.search(text))), None):
        raise Rejected("format", f"{tag} is out of place: each call must be code followed by its output")
    return tuple(steps), final


def _unfenced(code: str) -> str:
    fence = _FENCE.match(code)
    return fence[1] if fence else code.strip("\n")


def code_of(call: Mapping[str, Any]) -> str:
    """The code of an interpreter call. Raises DataError."""
    code = call["function"]["arguments"].get("code")
    if call["function"]["name"] != TOOL_NAME or not isinstance(code, str):
        raise DataError(f"a call of {TOOL_NAME} without code: {call!r:.200}")
    return code


@dataclass(frozen=True)
class Conversion:
    """Settings of a conversion.

    ``truth``: the column with the ground truth; "" if there is none.
    ``interpreter``: the interpreter's name in the data.
    ``box``: require a boxed answer in each row.
    ``as_is``: keep user turns and the interpreter's schema unchanged.
    ``notes``: number of changes in rows that passed, by kind.
    """

    protocol: ProtocolName = "hermes"
    truth: str = ""
    sandbox: Sandbox | None = None  # if set, re-executes every snippet and compares its output
    interpreter: str = TOOL_NAME
    box: bool = True
    as_is: bool = False
    notes: Counter[str] = field(default_factory=Counter[str])

    @property
    def stages(self) -> tuple[str, ...]:
        skipped = {"answer": not self.truth, "execution": self.sandbox is None}
        return tuple(stage for stage in STAGES if not skipped.get(stage))

    async def row(self, where: str, source: Mapping[str, Any]) -> dict[str, Any]:
        """Convert one row. Raises Rejected, or DataError for a row that cannot be read."""
        notes = Counter[str]()
        turns = expanded(read_turns(source["messages"]))
        final = turns[-1]["content"]  # still with the <answer> tags, for the inline format
        turns[-1] = {**turns[-1], "content": re.sub(r"\s*</?answer>\s*", "\n", final).strip()}
        tools = self._tools(source, where, notes)
        calls = self._read_calls(turns, tools, notes)
        if problem := format_problem(turns, box=self.box) or end_tag_problem(calls, self.protocol):
            raise Rejected("format", problem)
        row: dict[str, Any] = {}
        if self.truth:
            row["ground_truth"] = truth = self._truth(source)
            if problem := await asyncio.to_thread(answer_problem, turns, truth):
                raise Rejected("answer", problem)
        await self._execute(turns)
        question = next(turn for turn in turns if turn["role"] == "user")["content"]
        text_only = not calls and "tools" in source and not tools and QUESTION_HEADER not in question
        turns = self._rewrite_prompt(turns, notes)
        if text_only:  # the row offers no tool
            made = {"messages": turns, "tools": None, **row}
        elif self.protocol == "retool":
            made = {"messages": self._inline(turns, tools, final), "tools": None, **row}
        else:
            made = {"messages": turns, "tools": tools or [CODE_INTERPRETER], **row}
        self.notes.update(notes)
        return made

    def _truth(self, source: Mapping[str, Any]) -> str:
        try:
            return truth_text(source[self.truth], f"column {self.truth}")
        except DataError as error:
            raise Rejected("answer", str(error)) from error

    def _tools(self, source: Mapping[str, Any], where: str, notes: Counter[str]) -> list[dict[str, Any]]:
        """The row's tool schemas, with the interpreter's replaced by the rollout's; [] for none."""
        declared = parse_tools(source.get("tools"), where) or []
        names = (self.interpreter, TOOL_NAME)
        if self.as_is or not any(tool["function"].get("name") in names for tool in declared):
            return declared
        tools = [CODE_INTERPRETER if tool["function"].get("name") in names else tool for tool in declared]
        if tools != declared:
            notes["rows whose interpreter schema is replaced by the rollout's (--as-is keeps it)"] += 1
        return tools

    def _read_calls(
        self, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], notes: Counter[str]
    ) -> list[dict[str, Any]]:
        """Normalise the calls in ``turns`` in place and return all of them.

        Arguments become mappings, and the interpreter gets its standard name.
        """
        declared = [tool["function"].get("name") for tool in tools] or [TOOL_NAME]
        calls = list[dict[str, Any]]()
        for index, turn in enumerate(turns):
            if not turn.get("tool_calls"):
                continue
            turn["tool_calls"] = [
                normalised_call(call, f"message {index}, call {number}")
                for number, call in enumerate(turn["tool_calls"])
            ]
            for call in turn["tool_calls"]:
                name = call["function"]["name"]
                if name == self.interpreter != TOOL_NAME:
                    notes[f"calls of {name} renamed to {TOOL_NAME}"] += 1
                    name = call["function"]["name"] = TOOL_NAME
                if name not in declared:
                    remedy = "" if tools else f" If it is the interpreter, add --interpreter {name}."
                    raise DataError(
                        f"a call of {name}, but the tools are {', '.join(map(str, declared))}. Add the schema of your "
                        f"own tool to the row's column tools.{remedy}"
                    )
                if name == TOOL_NAME:
                    code_of(call)
            calls += turn["tool_calls"]
        return calls

    def _rewrite_prompt(self, turns: Sequence[dict[str, Any]], notes: Counter[str]) -> list[dict[str, Any]]:
        """Rewrite a single user turn to the prompt that rollouts use for its problem.

        Conversations with several user turns stay unchanged.
        """
        users = [turn for turn in turns if turn["role"] == "user"]
        plain = [{key: value for key, value in turn.items() if key not in ("tool_call_id", "name")} for turn in turns]
        if self.as_is or len(users) != 1:
            return plain
        problem, names = unwrap(users[0]["content"])
        theirs = [name for name in names if name not in OURS]
        asks = any("\\boxed" in turn["content"] for turn in plain if turn["role"] in ("system", "user"))
        if not problem or (not names and (asks or not self.box)):
            return plain
        if theirs:
            notes["user turns whose instructions from other data sets are replaced by ours (--as-is keeps them)"] += 1
        elif not names:
            notes["user turns that get a line asking for a boxed answer (--as-is omits it)"] += 1
        prompt = {"content": hermes_prompt(problem)}
        return [{**turn, **prompt} if turn["role"] == "user" else turn for turn in plain]

    def _inline(
        self, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], final: str
    ) -> list[dict[str, Any]]:
        others = [tool["function"].get("name") for tool in tools if tool["function"].get("name") != TOOL_NAME]
        if others or sum(turn["role"] == "user" for turn in turns) != 1:
            what = f"the tools {', '.join(map(str, others))}" if others else "several user turns"
            raise Rejected("format", f"protocol retool does not support {what}. Use --protocol hermes")
        made = inline(turns, final)
        if self.as_is:
            return made
        prompt = retool_prompt(problem_of(next(turn["content"] for turn in made if turn["role"] == "user")))
        return [{**turn, "content": prompt} if turn["role"] == "user" else turn for turn in made]

    async def _execute(self, turns: Sequence[Mapping[str, Any]]) -> None:
        if self.sandbox is None:
            return
        number = 0
        for index, turn in enumerate(turns):
            for place, call in enumerate(turn.get("tool_calls") or ()):
                number += 1
                if call["function"]["name"] != TOOL_NAME:
                    continue
                shown = turns[index + 1 + place]["content"]
                result = await self.sandbox.execute(code_of(call), run_timeout_s=RUN_TIMEOUT_S)
                if result.text.split() != shown.split():
                    raise Rejected(
                        "execution", f"call {number} prints {result.text!r:.120}, but the trace shows {shown!r:.120}"
                    )


async def convert_sft(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    conversion: Conversion,
    on_row: Callable[[], None] = lambda: None,
    *,
    report: ConversionReport | None = None,
) -> ConversionReport:
    """Convert rows (where, {messages, ...}) in order.

    ``report``: may already contain rejects from reading the file. Raises DataError if no row
    passes.
    """
    slots = asyncio.Semaphore(ROWS_AT_ONCE)
    report = report or ConversionReport()
    report.stages = conversion.stages
    for where, source in rows:
        if conversion.truth and conversion.truth not in source:
            raise DataError(f"{where}: no column {conversion.truth}; it has {', '.join(source)}. {REMEDIES['answer']}")

    async def convert(where: str, source: Mapping[str, Any]) -> dict[str, Any] | Rejected:
        async with slots:
            try:
                return await conversion.row(where, source)
            except DataError as error:
                return Rejected("source", str(error))
            except Rejected as rejected:
                return rejected
            finally:
                on_row()

    results = await asyncio.gather(*(convert(where, source) for where, source in rows))
    for (where, source), result in zip(rows, results, strict=True):
        if isinstance(result, Rejected):
            report.reject(where, result, {"messages": source["messages"]})
        else:
            report.rows.append(result)
    report.notes.update(conversion.notes)
    if not report.rows:
        if not report.rejects:
            raise DataError("there are no rows to convert")
        raise report.nothing_left(rows[0][1] if rows else {}, REMEDIES[report.rejects[0]["stage"]])
    if any(call["function"]["name"] != TOOL_NAME for row in report.rows for call in _calls_of(row)):
        report.rows = [_in_json(row) for row in report.rows]
    return report


def _calls_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [call for turn in row["messages"] for call in turn.get("tool_calls") or ()]


def _in_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Encode schemas and arguments as JSON text, because a parquet column has a single type."""
    turns = list[dict[str, Any]]()
    for turn in row["messages"]:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls") or ()
        ]
        turns.append({**turn, "tool_calls": calls} if calls else dict(turn))
    return {**row, "messages": turns, "tools": json.dumps(row["tools"]) if row["tools"] else None}
