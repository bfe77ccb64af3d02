"""Parses a model turn into a tool call, an answer, plain text, or a malformed call.

Each protocol's format has a parser. It takes text and returns one ``Parsed``; it never changes the
sampled tokens. It repairs an invalid call if it has exactly one interpretation, and records the
kind of each repair for the metrics. Otherwise ``Parsed.error`` explains the problem to the model.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from retool_mcore.data.tool import (
    CALL_END,
    CALL_START,
    CODE_END,
    CODE_START,
    TOOL_NAME,
    TaggedText,
    blocks,
    without_mentions,
)
from retool_mcore.errors import ConfigError
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout import schemas
from retool_mcore.rollout.tools import Tool, names_of

Kind = Literal["tool_call", "answer", "text", "malformed"]
Problem = Literal["tags", "json", "name", "arguments"]

MAX_START_TAGS = 8  # start tags to try per block
FENCE, LANGUAGES = "```", ("", "python", "python3", "py")
_JSON_START = re.compile(r"\s*(?:```(?:json)?\s*)?[{\[]")
_JSON_FENCE = re.compile(r"\s*```(?:json)?[^\S\n]*\n(.*\n)```\s*", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CALL_SHAPE = f'{{"name": "{TOOL_NAME}", "arguments": {{"code": "..."}}}}'


@dataclass(frozen=True)
class Call:
    """One tool call with its arguments; {"code": str} for the interpreter."""

    tool: str
    arguments: Mapping[str, Any]

    @property
    def code(self) -> str:
        """The interpreter's code, or another tool's arguments as JSON."""
        return self.arguments["code"] if self.tool == TOOL_NAME else json.dumps(self.arguments, ensure_ascii=False)


def code_calls(*codes: str) -> tuple[Call, ...]:
    """Interpreter calls, one per code string."""
    return tuple(Call(TOOL_NAME, {"code": code}) for code in codes)


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A parsed model turn.

    ``calls``: every call in the turn, in order; more than one only if the protocol does not end a
    turn at its first call. ``problem``: the kind of error of a malformed call. ``error``: its
    explanation for the model. ``repairs``: kinds of repairs made.
    """

    kind: Kind
    calls: tuple[Call, ...] = ()
    answer: str | None = None
    problem: Problem | None = None
    error: str | None = None
    repairs: tuple[str, ...] = ()

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(call.code for call in self.calls)

    def to_json(self) -> dict[str, Any]:
        """The object that ``retool parse`` prints; ``code`` is that of the first call."""
        return {
            "kind": self.kind,
            "code": self.codes[0] if self.codes else None,
            "answer": self.answer,
            "error": self.error,
            "repairs": list(self.repairs),
        }


class Malformed(Exception):
    """A call that cannot be run. The message is for the model."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem: Problem = problem

    def parsed(self, tools: Sequence[Tool] = ()) -> Parsed:
        """The malformed turn. The error lists all tools if there is more than the interpreter."""
        error = str(self)
        if tools and names_of(tools) not in error and self.problem != "arguments":
            error = f"{error.rstrip('.')}. The tools are {names_of(tools)}"
        return Parsed(kind="malformed", problem=self.problem, error=error)


def parse_hermes(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a turn in Qwen's (Hermes) format.

        <tool_call>\\n{"name": ..., "arguments": {"code": ...}}\\n</tool_call>

    One invalid call makes the whole turn malformed, so that no call is dropped silently. Tags that
    the text only mentions are not calls; see ``data.tool``. ``tools``: callable tools in addition
    to the interpreter.
    """
    called = [block for block in blocks(text, CALL_START, CALL_END) if _is_call(block, _JSON_START)]
    if not called:
        return parse_text_turn(without_mentions(text, CALL_START, CALL_END))
    return with_calls(lambda repairs: [_read_block(block, repairs, tools) for block in called], tools)


def with_calls(read: Callable[[list[str]], Sequence[Call]], tools: Sequence[Tool]) -> Parsed:
    """A turn with the calls that ``read`` returns; malformed if it raises Malformed.

    ``read`` appends the kinds of its repairs to its argument.
    """
    repairs: list[str] = []
    try:
        calls = read(repairs)
    except Malformed as error:
        return error.parsed(tools)
    return Parsed(kind="tool_call", calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))


def parse_text_turn(text: str) -> Parsed:
    """Parse a turn without calls: an answer if it has a boxed one, else text."""
    answer = last_answer(text)
    return Parsed(kind="text") if answer is None else Parsed(kind="answer", answer=answer)


def without_interpreter(parsed: Parsed, tools: Sequence[Tool]) -> Parsed:
    """Adapt a parsed turn to a run without the interpreter, where only ``tools`` may be called.

    An interpreter call becomes malformed. An error that mentions the interpreter keeps only
    its first sentence, the problem, and drops the example after it.
    """
    error = parsed.error or ""
    if any(call.tool == TOOL_NAME for call in parsed.calls):
        error = f"there is no tool named {TOOL_NAME!r}"
    elif TOOL_NAME in error:
        error = error.partition(". ")[0]
    else:
        return parsed
    message = f"{error}. The tools are {names_of(tools, interpreter=False)}"
    return Malformed(parsed.problem or "name", message).parsed()


def parse_retool(text: str) -> Parsed:
    """Parse a turn in the paper's inline format, up to the first </code> that ends a block.

        <code>\\n```python\\n...\\n```\\n</code>

    Code without a fence is accepted as is. A block without its end tag is not a call, because the
    model has ended its message and no result can follow.
    """
    block = next((block for block in blocks(text, CODE_START, CODE_END) if block.closed), None)
    if block is None:
        return parse_text_turn(without_mentions(text, CODE_START, CODE_END))
    # Use the last start tag followed by a fenced block: prose may mention the tag, and code may
    # contain it.
    bodies = [] if block.start is None else _after_start_tags(block.body, CODE_START)[::-1]
    for body in bodies[:MAX_START_TAGS]:
        code = _without_fence(body, fences := [])
        if fences:
            return Parsed(kind="tool_call", calls=code_calls(code))
    if bodies and FENCE not in bodies[0] and bodies[0].strip():
        return Parsed(kind="tool_call", calls=code_calls(bodies[0].strip("\n")), repairs=("missing_fence",))
    # The message avoids the tags, because ``render_output`` breaks up markup in results.
    error = "the text between the code tags is not one fenced block" if bodies else "the code has no opening tag"
    shape = f"{FENCE}python\n...\n{FENCE}"
    return Parsed(kind="malformed", problem="tags", error=f"{error}. Write it between the code tags as\n{shape}")


def _after_start_tags(body: str, start: str) -> list[str]:
    """The body of a block, and the text after each further start tag in it."""
    return [body, *(body[tag.end() :] for tag in re.finditer(re.escape(start), body))]


def _read_block(block: TaggedText, repairs: list[str], tools: Sequence[Tool]) -> Call:
    if block.start is None:
        raise Malformed("tags", f"the call has no opening tag. Write {_CALL_SHAPE} between the tool call tags")
    if not block.closed:
        repairs.append("missing_end_tag")
    bodies = _after_start_tags(block.body, CALL_START)[:MAX_START_TAGS]
    body = next((body for body in bodies if _JSON_START.match(body)), block.body)
    if body is not block.body and not block.body.replace(CALL_START, "").removesuffix(body).strip():
        repairs.append("doubled_tag")
    return read_call(_json_of(body, repairs), repairs, tools)


def _is_call(block: TaggedText, start: re.Pattern[str]) -> bool:
    return block.closed or block.alone or start.match(block.body) is not None


def _json_of(body: str, repairs: list[str]) -> str:
    """The body of a call without the Markdown fence that some models put around the JSON."""
    fenced = _JSON_FENCE.fullmatch(body)
    if fenced is None:
        return body.strip()
    repairs.append("json_fence")
    return fenced[1].strip()


def read_call(body: str, repairs: list[str], tools: Sequence[Tool]) -> Call:
    """Parse one call from a JSON object. Raises Malformed."""
    value = _read_object(body, repairs)
    if isinstance(value, list):
        calls = cast(list[Any], value)
        if len(calls) == 1:
            value = calls[0]
            repairs.append("list")
    if not isinstance(value, dict):
        raise Malformed("json", f"the call is JSON, but not an object. Write {_CALL_SHAPE}")
    call = cast(dict[str, Any], value)
    if "name" not in call and isinstance(function := call.get("function"), dict):
        repairs.append("function_wrapper")
        call = cast(dict[str, Any], function)
    arguments = call.get("arguments")
    if arguments is None and "parameters" in call:
        repairs.append("parameters_key")
        arguments = call["parameters"]
    return call_of(call.get("name"), arguments, repairs, tools)


def call_of(name: Any, arguments: Any, repairs: list[str], tools: Sequence[Tool]) -> Call:
    """Validate a call's name and arguments. Raises Malformed if they match no tool."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None and name != TOOL_NAME:
        known = f"The tools are {names_of(tools)}" if tools else f"The only tool is {TOOL_NAME!r}"
        raise Malformed("name", f"there is no tool named {name!r}. {known}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
        else:
            repairs.append("encoded_arguments")
    if tool is not None:
        if error := schemas.complaint(tool.name, tool.parameters, arguments):
            raise Malformed("arguments", error)
        return Call(tool.name, cast(dict[str, Any], arguments))
    return Call(TOOL_NAME, {"code": _code_of(arguments, repairs)})


def _code_of(arguments: Any, repairs: list[str]) -> str:
    code = cast(dict[str, Any], arguments).get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        raise Malformed("arguments", f'arguments must be an object with one string, "code". Write {_CALL_SHAPE}')
    if _SURROGATE.search(code):
        raise Malformed("arguments", "the code contains half of a surrogate pair, which is not a character")
    return _without_fence(code, repairs)


def _without_fence(code: str, repairs: list[str]) -> str:
    fenced = code.strip()
    language, _, body = fenced.removeprefix(FENCE).partition("\n")
    inner = body.removesuffix(FENCE)
    if not fenced.startswith(FENCE) or inner == body or FENCE in inner or language.strip().lower() not in LANGUAGES:
        return code
    repairs.append("code_fence")
    return inner.rstrip(" \t").removesuffix("\n")


# --- JSON with repairs: an invalid object is repaired if it has exactly one interpretation -------

_Reading = tuple[Any, list[str]]  # a value and the kinds of repairs
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')  # an escape of JSON, or a backslash that starts none
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CODE = re.compile(r'"code"\s*:\s*"')
# SystemError: Python 3.11.7, if a garbage collection runs code that parses (CPython issue 106905)
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError, SystemError)


def _read_object(body: str, repairs: list[str]) -> Any:
    """Decode ``body`` as JSON, with repairs.

    Raises Malformed with the strict decoder's error unless ``body`` has exactly one interpretation.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        complaint = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):  # a number with thousands of digits; brackets nested thousands deep
        raise Malformed(
            "json", f"the call has too large a number or is nested too deeply. Write {_CALL_SHAPE}"
        ) from None
    reading = _repaired_object(body)
    if reading is None:
        raise Malformed(
            "json",
            f"the call is not valid JSON: {complaint}. Write {_CALL_SHAPE}, with quotes, backslashes and line breaks "
            "of the code escaped",
        )
    value, kinds = reading
    repairs.extend(kinds)
    return value


def _repaired_object(body: str) -> _Reading | None:
    """Decode an object with single quotes, raw quotes or the faults that ``_lenient`` accepts.

    Code that was not escaped for JSON can be read in two ways: decoded, where "\\n" is a line
    break, or verbatim, where "\\n" stays two characters, as in a string literal. Use the reading
    that is valid Python. If both are valid and differ, use the decoded one if raw line breaks are
    the only fault; otherwise reject the call as ambiguous.
    """
    reading = _lenient(body)
    opening, end = _CODE.search(body), body.rfind('"')
    if opening is None or end < opening.end():
        return reading or _python_literal(body)
    before, raw, after = body[: opening.end()], body[opening.end() : end], body[end:]
    escaped = raw
    if reading is None:
        escaped = _QUOTE.sub(lambda match: '\\"' if match[0] == '"' else match[0], raw)
        reading = _lenient(before + escaped + after)
        if reading is None:
            return None
        reading[1].insert(0, "raw_quotes")
    value, kinds = reading
    decoded = _lenient(f'"{escaped}"')
    unescaped = {"control_characters", "backslashes", "raw_quotes"}.intersection(kinds)
    if decoded is None or "trailing_data" in decoded[1] or not unescaped:
        return reading
    readings = {text for text in (decoded[0], raw) if _is_python(text)}
    if len(readings) > 1:  # if only raw line breaks are wrong, the model meant JSON's escapes
        return reading if unescaped == {"control_characters"} else None
    if not readings and "raw_quotes" in kinds:
        return None
    # Code that is invalid either way is decoded as JSON does, and the interpreter reports it.
    if readings == {raw} != {decoded[0]}:
        reading = _lenient(before + json.dumps(raw)[1:-1] + after)
        return reading and (reading[0], list(dict.fromkeys([*kinds, "backslashes"])))
    return value, kinds


def _lenient(body: str) -> _Reading | None:
    """Decode JSON that has control characters, invalid escapes, missing braces or trailing text."""
    escaped = _ESCAPE.sub(lambda match: "\\\\" if match[0] == "\\" else match[0], body)
    for braces in ("", "}", "}}"):
        for strict in (True, False):
            try:
                value, end = json.JSONDecoder(strict=strict).raw_decode(escaped + braces)
            except (ValueError, RecursionError):
                continue
            rest = (escaped + braces)[end:].strip()
            kinds = {
                "control_characters": not strict,
                "backslashes": escaped != body,
                "missing_brace": bool(braces),
                "trailing_data": bool(rest),
            }
            return None if "{" in rest else (value, [kind for kind, present in kinds.items() if present])
    return None


def _quietly(parse: Callable[[str], Any], text: str) -> Any:
    """``parse(text)`` without warnings about escapes such as "\\d" in the model's code."""
    with warnings.catch_warnings(action="ignore"):
        return parse(text)


def _is_python(code: str) -> bool:
    try:
        _quietly(ast.parse, _without_fence(code, []))
    except _UNPARSABLE:
        return False
    return True


def _python_literal(body: str) -> _Reading | None:
    try:
        value = _quietly(ast.literal_eval, body)
    except _UNPARSABLE:
        return None
    return (cast(Any, value), ["single_quotes"]) if isinstance(value, dict) else None


# --- the formats of Llama 3, Mistral and Qwen3-Coder ---------------------------------------------

PYTHON_TAG, TOOL_CALLS, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")
_ID = re.compile(r"\w{9}")


def parse_llama3(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Llama 3 turn. Its one call is the whole turn or everything after <|python_tag|>."""
    _, tagged, body = text.partition(PYTHON_TAG)
    if not tagged:
        if not _LLAMA_CALL.match(text):
            return parse_text_turn(text)
        body = text
    elif not _LLAMA_CALL.match(body) and body.strip():
        return Parsed(kind="tool_call", calls=code_calls(body.strip()))  # the format of Llama's built-in interpreter
    parsed = with_calls(lambda repairs: [read_call(body.strip(), repairs, tools)], tools)
    return replace(parsed, repairs=tuple(kind for kind in parsed.repairs if kind != "parameters_key"))


def parse_mistral(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Mistral turn: a JSON list of calls, or a name and its arguments."""
    first, *bodies = text.split(TOOL_CALLS)
    if not bodies:
        return parse_text_turn(first)
    return with_calls(
        lambda repairs: [call for body in bodies for call in _mistral_calls(body.strip(), repairs, tools)], tools
    )


def mistral_ids(text: str) -> list[str]:
    """The call ids in a Mistral turn; [] unless every call has a valid one."""
    all_ids: list[str | None] = []
    for body in text.split(TOOL_CALLS)[1:]:
        if name := _MISTRAL_NAME.match(body):
            all_ids.append(name[2])
        else:
            all_ids += [cast("str | None", call.get("id")) for call in _list_of(body) or ()]
    ids = [call_id for call_id in all_ids if isinstance(call_id, str) and _ID.fullmatch(call_id)]
    return ids if len(ids) == len(all_ids) else []


def parse_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Qwen3-Coder turn. Each value is unescaped text in a tag named after its parameter."""
    called = [block for block in blocks(text, CALL_START, CALL_END) if _is_call(block, _FUNCTION)]
    if not called:
        return parse_text_turn(without_mentions(text, CALL_START, CALL_END))
    return with_calls(lambda repairs: [_xml_call(block, repairs, tools) for block in called], tools)


def _mistral_calls(body: str, repairs: list[str], tools: Sequence[Tool]) -> list[Call]:
    if name := _MISTRAL_NAME.match(body):
        arguments = body[name.end() :].strip()
        shape = json.dumps(name[1])
        return [read_call(f'{{"name": {shape}, "arguments": {arguments}}}', repairs, tools)]
    calls = _list_of(body)
    if calls is None:  # one call, or a list of one call that is slightly invalid JSON
        return [read_call(body.removeprefix("[").removesuffix("]").strip(), repairs, tools)]
    return [read_call(json.dumps(call), repairs, tools) for call in calls]


def _list_of(body: str) -> list[dict[str, Any]] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    calls = cast("list[Any]", value) if isinstance(value, list) else []
    return calls if calls and all(isinstance(call, dict) for call in calls) else None


def _xml_call(block: TaggedText, repairs: list[str], tools: Sequence[Tool]) -> Call:
    if not block.closed:
        repairs.append("missing_end_tag")
    function = _FUNCTION.match(block.body)
    shape = f"<function={TOOL_NAME}>\n<parameter=code>\n...\n</parameter>\n</function>"
    if function is None:
        # The message avoids the outer tags, because ``render_output`` breaks up markup in results.
        raise Malformed("tags", f"the call has no function. Write it between the tool call tags as\n{shape}")
    name, inside = function[1].strip(), block.body[function.end() :]
    values: dict[str, Any] = {match[1].strip(): match[2] for match in _PARAMETER.finditer(inside)}
    if (tool := next((tool for tool in tools if tool.name == name), None)) is not None:
        kinds = tool.parameters.get("properties", {})
        values = {key: _typed(value, kinds.get(key)) for key, value in values.items()}
    return call_of(name, values, repairs, tools)


def _typed(value: str, schema: Any) -> Any:
    """Convert a value to its schema's type: strings stay as they are, other types are JSON."""
    if isinstance(schema, dict) and cast("dict[str, Any]", schema).get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


PARSERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "retool": parse_retool,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
}


def parser_of(protocol: str) -> Callable[[str], Parsed]:
    """The parser for a protocol's model turns. Raises ConfigError for an unknown name."""
    if protocol not in PARSERS:
        raise ConfigError(f"Unknown protocol {protocol!r}. Choose one of: {', '.join(PARSERS)}.")
    return PARSERS[protocol]
