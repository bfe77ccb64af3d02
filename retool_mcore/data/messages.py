"""Checks and unifies the messages of rows and prompts before a template renders them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from retool_mcore.data.chat_format import ChatFormat, Message
from retool_mcore.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


def clean_messages(messages: Sequence[Message], fmt: ChatFormat) -> list[dict[str, Any]]:
    """Check messages and unify them: drop nulls of columnar files, make call arguments mappings."""
    return with_call_ids([_clean_message(message, index, fmt) for index, message in enumerate(messages)])


def with_call_ids(messages: Sequence[Message], call_ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The messages with an id on each call and on its result, which some templates ask for.

    ``call_ids`` are those of the first calls; the others count from 0 in each turn: nine letters
    and digits, as Mistral's templates demand. Templates that write no ids do not see them.
    """
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    for given in messages:
        message = dict(given)
        if "tool_calls" in message:
            waiting = [*call_ids, *(f"call{number:05d}" for number in range(len(message["tool_calls"])))]
            calls = zip(message["tool_calls"], waiting, strict=False)
            message["tool_calls"] = [{**call, "id": call_id} for call, call_id in calls]
        elif message["role"] == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        found.append(message)
    return found


def _clean_message(message: Message, index: int, fmt: ChatFormat) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"message {index}: role = {role!r} is none of {', '.join(ROLES)}")
    given = message.get("tool_calls")
    if given is not None and not isinstance(given, Sequence):
        raise DataError(f"message {index} ({role}): tool_calls is {given!r:.80}, which is no list")
    calls = cast("Sequence[Any] | None", given) or None
    if content is None and role == "assistant" and calls is not None:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"message {index} ({role}): content is {type(content).__name__}, neither text nor a tool call")
    if role == "tool":
        return {"role": role, "content": neutralise(content, fmt)}
    _refuse_specials(content, f"message {index} ({role})", fmt)
    clean: dict[str, Any] = {"role": role, "content": content}
    if reasoning := message.get("reasoning_content"):
        if not isinstance(reasoning, str):
            raise DataError(f"message {index} ({role}): reasoning_content is {reasoning!r:.80}, which is no text")
        _refuse_specials(reasoning, f"message {index} ({role})", fmt)
        clean["reasoning_content"] = reasoning
    if calls is not None:
        if role != "assistant":
            raise DataError(f"message {index} ({role}): only an assistant makes tool calls")
        clean["tool_calls"] = [_clean_call(call, f"message {index}, call {n}", fmt) for n, call in enumerate(calls)]
    return clean


def _clean_call(call: Any, where: str, fmt: ChatFormat) -> dict[str, Any]:
    function = call.get("function") if _is_mapping(call) else None
    if not _is_mapping(function) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call is {{function: {{name, arguments}}}}, this one is {call!r:.200}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: arguments are not JSON: {error}") from error
    if not _is_mapping(arguments):
        raise DataError(f"{where}: arguments are {type(arguments).__name__}, not a mapping")
    arguments = {key: value for key, value in arguments.items() if value is not None}
    _refuse_specials(json.dumps(arguments, ensure_ascii=False), where, fmt)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _refuse_specials(text: str, where: str, fmt: ChatFormat) -> None:
    found = next((token for token in fmt.specials if token in text), None)
    if found is not None:
        raise DataError(f"{where}: the text contains the control token {found}, which would end or forge a turn")


def neutralise(content: str, fmt: ChatFormat) -> str:
    """Break up turn and tool markup in a tool's output: "<|im_end|>" becomes "< |im_end|>"."""
    text = content.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which tokenizers refuse
    return fmt.markup.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
