"""Reads a model turn: a tool call, an answer, text, or a malformed call.

The functions take text and return one ``Parsed``; they never touch the sampled tokens. An invalid
call is repaired when it has exactly one reading, and each kind of repair has a name so that it can
be counted. Otherwise ``Parsed.error`` gives the reason in words for the model.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_START, TOOL_NAME, TaggedText, blocks, words
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.tools import Tool, complaint, names_of

Kind = Literal["tool_call", "answer", "text", "malformed"]
Problem = Literal["tags", "json", "name", "arguments"]

MAX_START_TAGS = 8  # of one block; each is tried
FENCE, LANGUAGES = "```", ("", "python", "python3", "py")
_JSON_START = re.compile(r"\s*(?:```(?:json)?\s*)?[{\[]")
_JSON_FENCE = re.compile(r"\s*```(?:json)?[^\S\n]*\n(.*\n)```\s*", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CALL_SHAPE = f'{{"name": "{TOOL_NAME}", "arguments": {{"code": "..."}}}}'


@dataclass(frozen=True)
class Call:
    """One call of a tool with its arguments; of the interpreter they are {"code": str}."""

    tool: str
    arguments: Mapping[str, Any]

    @property
    def code(self) -> str:
        """What is shown of it: the interpreter's code, or another tool's arguments as JSON."""
        return self.arguments["code"] if self.tool == TOOL_NAME else json.dumps(self.arguments, ensure_ascii=False)


def code_calls(*codes: str) -> tuple[Call, ...]:
    """Calls of the interpreter."""
    return tuple(Call(TOOL_NAME, {"code": code}) for code in codes)


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What one model turn says.

    ``calls`` holds every call in the turn, in order; it has more than one entry only where the turn
    was not cut at the first call. ``problem`` is the kind of a malformed call, ``error`` its
    explanation for the model.
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
    """A call that cannot be made; the message is for the model."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem: Problem = problem

    def parsed(self, tools: Sequence[Tool] = ()) -> Parsed:
        """The turn; its error names the tools where the interpreter is not the only one."""
        error = str(self)
        if tools and names_of(tools) not in error and self.problem != "arguments":
            error = f"{error.rstrip('.')}. The tools are {names_of(tools)}"
        return Parsed(kind="malformed", problem=self.problem, error=error)


def parse_hermes(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Read a turn of Qwen's form.

        <tool_call>\\n{"name": ..., "arguments": {"code": ...}}\\n</tool_call>

    Every call of the turn must be readable, or the whole turn is malformed: no call is dropped
    silently. Tags that are only mentioned are no calls; see ``call_tags``. ``tools`` may be called
    besides the interpreter.
    """
    found = [block for block in blocks(text, CALL_START, CALL_END) if _is_call(block)]
    if not found:
        return without_call(words(text, CALL_START, CALL_END))
    repairs: list[str] = []
    try:
        calls = [_read_block(block, repairs, tools) for block in found]
    except Malformed as error:
        return error.parsed(tools)
    return Parsed(kind="tool_call", calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))


def without_call(text: str) -> Parsed:
    """What a turn without a call says."""
    answer = last_answer(text)
    return Parsed(kind="text") if answer is None else Parsed(kind="answer", answer=answer)


def without_interpreter(parsed: Parsed, tools: Sequence[Tool]) -> Parsed:
    """The same turn where ``tools`` alone may be called, and nothing told to the model names more.

    Errors say what is wrong, and after the first period how it is written.
    """
    error = parsed.error or ""
    if any(call.tool == TOOL_NAME for call in parsed.calls):
        error = f"there is no tool named {TOOL_NAME!r}"
    elif TOOL_NAME in error:
        error = error.partition(". ")[0]
    else:
        return parsed
    told = f"{error}. The tools are {names_of(tools, interpreter=False)}"
    return Malformed(parsed.problem or "name", told).parsed()


def parse_retool(text: str) -> Parsed:
    """Read a turn of the paper's form, up to the first </code> that ends a block.

        <code>\\n```python\\n...\\n```\\n</code>

    Code without its fence is taken as it stands. A block without its end tag is no call: nothing
    can be written after it, since the model has closed its message.
    """
    block = next((block for block in blocks(text, CODE_START, CODE_END) if block.closed), None)
    if block is None:
        return without_call(words(text, CODE_START, CODE_END))
    # Use the last start tag that gives a fenced block: prose may mention the tag, and code may
    # contain it.
    bodies = [] if block.start is None else _after_start_tags(block.body, CODE_START)[::-1]
    for body in bodies[:MAX_START_TAGS]:
        code = _without_fence(body, fences := [])
        if fences:
            return Parsed(kind="tool_call", calls=code_calls(code))
    if bodies and FENCE not in bodies[0] and bodies[0].strip():
        return Parsed(kind="tool_call", calls=code_calls(bodies[0].strip("\n")), repairs=("missing_fence",))
    # The message does not spell the tags: markup in a result is broken up before the model sees it.
    error = "what the code tags hold is not one fenced block" if bodies else "the code has no opening tag"
    shape = f"{FENCE}python\n...\n{FENCE}"
    return Parsed(kind="malformed", problem="tags", error=f"{error}. Write it between the code tags as\n{shape}")


def _after_start_tags(body: str, start: str) -> list[str]:
    """The body of a block, and what follows each further start tag in it."""
    return [body, *(body[tag.end() :] for tag in re.finditer(re.escape(start), body))]


def _read_block(block: TaggedText, repairs: list[str], tools: Sequence[Tool]) -> Call:
    if block.start is None:
        raise Malformed("tags", f"the call has no opening tag. Write {_CALL_SHAPE} between the tool call tags")
    if not block.closed:
        repairs.append("missing_end_tag")
    bodies = _after_start_tags(block.body, CALL_START)[:MAX_START_TAGS]
    body = next((body for body in bodies if _begins_json(body)), block.body)
    if body is not block.body and not block.body.replace(CALL_START, "").removesuffix(body).strip():
        repairs.append("doubled_tag")
    return read_call(_json_of(body, repairs), repairs, tools)


def _is_call(block: TaggedText) -> bool:
    return block.closed or block.alone or _begins_json(block.body)


def _begins_json(body: str) -> bool:
    return _JSON_START.match(body) is not None


def _json_of(body: str, repairs: list[str]) -> str:
    """The body of a call without the fence that some models put around the JSON."""
    fenced = _JSON_FENCE.fullmatch(body)
    if fenced is None:
        return body.strip()
    repairs.append("json_fence")
    return fenced[1].strip()


def read_call(body: str, repairs: list[str], tools: Sequence[Tool]) -> Call:
    """The call that a JSON object describes. Raises Malformed."""
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
    """A call that is valid JSON. Raises Malformed when no tool can be called so."""
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
        if error := complaint(tool, arguments):
            raise Malformed("arguments", error)
        return Call(tool.name, cast(dict[str, Any], arguments))
    return Call(TOOL_NAME, {"code": _code_of(arguments, repairs)})


def _code_of(arguments: Any, repairs: list[str]) -> str:
    code = cast(dict[str, Any], arguments).get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        raise Malformed("arguments", f'arguments must be an object with one string, "code". Write {_CALL_SHAPE}')
    if _SURROGATE.search(code):
        raise Malformed("arguments", "the code holds half of a surrogate pair, which is no character")
    return _without_fence(code, repairs)


def _without_fence(code: str, repairs: list[str]) -> str:
    fenced = code.strip()
    language, _, body = fenced.removeprefix(FENCE).partition("\n")
    inner = body.removesuffix(FENCE)
    if not fenced.startswith(FENCE) or inner == body or FENCE in inner or language.strip().lower() not in LANGUAGES:
        return code
    repairs.append("code_fence")
    return inner.rstrip(" \t").removesuffix("\n")


# --- one JSON object, read as it is, or repaired where it has exactly one reading ---------------


def _read_object(body: str, repairs: list[str]) -> Any:
    """The value of ``body``.

    Raises Malformed with the strict reader's complaint unless ``body`` has exactly one reading.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        complaint = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets thousands deep
        raise Malformed("json", f"the call is too large a number or nested too deeply. Write {_CALL_SHAPE}") from None
    for repair in (_repair_unescaped_code, _relaxed, _python_literal):
        value, kinds = repair(body)
        if kinds:
            repairs.extend(kinds)
            return value
    raise Malformed(
        "json",
        f"the call is not valid JSON: {complaint}. Write {_CALL_SHAPE}, with quotes, backslashes and line breaks of "
        "the code escaped",
    )


_Reading = tuple[Any, list[str]]  # a value and what was repaired; nothing repaired: no reading
_UNREADABLE: _Reading = (None, [])

_SHAPE = re.compile(
    r'\{\s*"name"\s*:\s*"(?P<name>\w+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{\s*"code"\s*:\s*"'
    r'(?P<code>.*)"(?P<braces>[\s}]*+)(?P<rest>[^{"]*)',
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')  # what JSON allows after a backslash
_CLOSED = 2  # braces that close the arguments and the call


def _repair_unescaped_code(body: str) -> _Reading:
    """A call in the shape that we ask for, whose code is not escaped as JSON requires.

    Such code has two readings: with its escapes decoded, and as it stands. "\\n" between two
    statements is a line break in the first reading; "\\n" in a string literal belongs to the
    second. The reading that is valid Python is taken. If both are valid and differ, neither is.
    """
    match = _SHAPE.fullmatch(body)
    if match is None:
        return _UNREADABLE
    raw = match["code"]
    kinds: list[str] = []
    if _CONTROL.search(raw):
        kinds.append("control_characters")
    loose = _ESCAPE.sub("", raw)
    if "\\" in loose:
        kinds.append("backslashes")
    if '"' in loose:
        kinds.append("raw_quotes")
    decoded = _decode(raw)
    if not kinds:
        code: str | None = decoded
    else:
        readings = {text for text in (decoded, raw) if _is_python(text)}
        code = readings.pop() if len(readings) == 1 else None
        if code is None and not readings and "raw_quotes" not in kinds:
            code = decoded  # not Python either way: the format's own reading, and the interpreter will complain
        if code == raw != decoded and "backslashes" not in kinds:
            kinds.append("backslashes")
    closed = match["braces"].count("}")
    if closed < _CLOSED:
        kinds.append("missing_brace")
    if closed > _CLOSED or match["rest"].strip():
        kinds.append("trailing_data")
    if code is None or (closed < _CLOSED and match["rest"].strip()):
        return _UNREADABLE
    return {"name": match["name"], "arguments": {"code": code}}, kinds


def _decode(raw: str) -> str:
    """Decode JSON's escapes. A backslash that starts no valid escape stays as it is."""

    def escaped(match: re.Match[str]) -> str:
        return str(json.loads(f'"{match[0]}"'))

    # Decode runs of escapes together: two \\u escapes may be one character.
    return re.sub(f"(?:{_ESCAPE.pattern})+", escaped, raw)


def _quietly(parse: Callable[[str], Any], text: str) -> Any:
    """``parse(text)`` without warnings, once more after a SystemError.

    "\\d" in a plain string is the model's affair. Up to Python 3.11.7, parsing fails when a garbage
    collection in the middle of it runs code that parses, too (CPython 106905).
    """
    with warnings.catch_warnings(action="ignore"):
        try:
            return parse(text)
        except SystemError:
            return parse(text)


def _is_python(code: str) -> bool:
    try:
        _quietly(ast.parse, _without_fence(code, []))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _relaxed(body: str) -> _Reading:
    """Any other object.

    Accepts control characters in strings, missing braces at the end, and text after the end.
    """
    decoder = json.JSONDecoder(strict=False)
    kinds = ["control_characters"] if re.search(r"[\x00-\x1f]", body.strip()) else []
    for braces in ("", "}", "}}"):
        try:
            value, end = decoder.raw_decode(body + braces)
        except (ValueError, RecursionError):
            continue
        rest = (body + braces)[end:].strip()
        if "{" in rest:
            return _UNREADABLE
        kinds += ["missing_brace"] if braces else []
        kinds += ["trailing_data"] if rest else []
        return value, kinds
    return _UNREADABLE


def _python_literal(body: str) -> _Reading:
    try:
        value = _quietly(ast.literal_eval, body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _UNREADABLE
    return (cast(Any, value), ["single_quotes"]) if isinstance(value, dict) else _UNREADABLE
