"""Parsers for the native tool-call formats of Llama 3, Mistral and Qwen3-Coder.

``tool_turns`` describes the formats.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from retool_mcore.data.tool import CALL_END, CALL_START, TOOL_NAME, TaggedText, blocks, words
from retool_mcore.errors import ConfigError
from retool_mcore.rollout.tool_call import (
    Call,
    Malformed,
    Parsed,
    call_of,
    code_calls,
    parse_hermes,
    parse_retool,
    read_call,
    without_call,
)
from retool_mcore.rollout.tools import Tool

PYTHON_TAG, TOOL_CALLS, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")
_ID = re.compile(r"\w{9}")


def parse_llama3(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Llama 3 turn. A call is either the whole turn or everything after <|python_tag|>."""
    _, tagged, body = text.partition(PYTHON_TAG)
    if not tagged:
        if not _LLAMA_CALL.match(text):
            return without_call(text)
        body = text
    elif not _LLAMA_CALL.match(body) and body.strip():
        return Parsed(kind="tool_call", calls=code_calls(body.strip()))  # the format of Llama's built-in interpreter
    repairs: list[str] = []
    try:
        calls = [read_call(each, repairs, tools) for each in _objects(body)]
    except Malformed as error:
        return error.parsed(tools)
    return _parsed(calls, [repair for repair in repairs if repair != "parameters_key"])


def parse_mistral(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Mistral turn: a JSON list of calls, or a name and its arguments."""
    first, *bodies = text.split(TOOL_CALLS)
    if not bodies:
        return without_call(first)
    repairs: list[str] = []
    calls: list[Call] = []
    try:
        for body in bodies:
            calls += _mistral_calls(body.strip(), repairs, tools)
    except Malformed as error:
        return error.parsed(tools)
    return _parsed(calls, repairs)


def mistral_ids(text: str) -> list[str]:
    """The call ids in a Mistral turn; [] unless every call has a valid one."""
    found: list[str | None] = []
    for body in text.split(TOOL_CALLS)[1:]:
        if name := _MISTRAL_NAME.match(body):
            found.append(name[2])
        else:
            found += [cast("str | None", call.get("id")) for call in _list_of(body) or ()]
    ids = [call_id for call_id in found if isinstance(call_id, str) and _ID.fullmatch(call_id)]
    return ids if len(ids) == len(found) else []


def parse_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> Parsed:
    """Parse a Qwen3-Coder turn. Each value is unescaped text in a tag named after its parameter."""
    found = [block for block in blocks(text, CALL_START, CALL_END) if _is_xml_call(block)]
    if not found:
        return without_call(words(text, CALL_START, CALL_END))
    repairs: list[str] = []
    try:
        calls = [_xml_call(block, repairs, tools) for block in found]
    except Malformed as error:
        return error.parsed(tools)
    return _parsed(calls, repairs)


READERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "retool": parse_retool,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
}


def reader(protocol: str) -> Callable[[str], Parsed]:
    """The parser for a protocol's model turns. Raises ConfigError for an unknown name."""
    if protocol not in READERS:
        raise ConfigError(f"protocol = {protocol!r} is none of {', '.join(READERS)}.")
    return READERS[protocol]


def _parsed(calls: Sequence[Call], repairs: Sequence[str]) -> Parsed:
    return Parsed(kind="tool_call", calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))


def _objects(body: str) -> list[str]:
    """Split JSON objects separated by ";". Any other text is returned as a single item."""
    decoder = json.JSONDecoder()
    found: list[str] = []
    at = len(body) - len(body.lstrip())
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return [body.strip()]
        found.append(body[at:end])
        rest = body[end:].lstrip()
        if rest and not rest.startswith(";"):
            return [body.strip()]
        rest = rest.removeprefix(";").lstrip()
        at = len(body) - len(rest)
    return found or [body.strip()]


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


def _is_xml_call(block: TaggedText) -> bool:
    return block.closed or block.alone or _FUNCTION.match(block.body) is not None


def _xml_call(block: TaggedText, repairs: list[str], tools: Sequence[Tool]) -> Call:
    if not block.closed:
        repairs.append("missing_end_tag")
    function = _FUNCTION.match(block.body)
    shape = f"<function={TOOL_NAME}>\n<parameter=code>\n...\n</parameter>\n</function>"
    if function is None:
        # The message avoids the outer tags, because ``shown`` breaks up markup in results.
        raise Malformed("tags", f"the call is no function in the tool call tags. Write it between them as\n{shape}")
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
