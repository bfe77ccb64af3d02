r"""Conversations with tool calls, in OpenAI's form or ShareGPT's, as messages in OpenAI's form.

ShareGPT's turns are {from, value}. A call is a turn of its own (``function_call``, JSON) or stands
in the assistant's text between ``<tool_call>`` tags.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from retool_mcore.config.base import is_tables
from retool_mcore.data.layouts import example
from retool_mcore.errors import DataError

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
    """Yield rows (where, row) with their conversation in the column ``messages``, in OpenAI's form.

    What is no conversation stays as it is, for the report of the conversion. Raises DataError for a
    row without ``column``, or without any of COLUMNS; such rows go to ``on_bad`` when it is given.
    """
    names = (column,) if column else COLUMNS
    for where, row in rows:
        name = next((each for each in names if each in row), None)
        if name is None:
            error = DataError(
                f"{where}: no column {' or '.join(names)}; it has {', '.join(row) or 'none'}. The row: {example(row)}. "
                f"{OPTION}"
            )
            if on_bad is None:
                raise error
            on_bad(where, error)
            continue
        yield where, {**row, "messages": openai_messages(row[name])}


def openai_messages(turns: Any) -> Any:
    """Turns of ShareGPT in OpenAI's form; other values as they are."""
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError:
            return turns
    if not is_tables(turns):
        return turns
    if turns and all("from" in turn and "value" in turn for turn in turns):
        turns = _joined([_of_sharegpt(turn) for turn in turns])
    return turns


def _of_sharegpt(turn: Mapping[str, Any]) -> dict[str, Any]:
    said, text = turn["from"], turn["value"]
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = ROLES.get(said, said) if isinstance(said, str) else said
    if not isinstance(text, str):
        return {**rest, "role": role, "content": text}
    if said == "function_call":
        return {**rest, "role": role, "content": "", "tool_calls": _calls(text)}
    if role == "assistant" and (found := list(_CALL.finditer(text))):
        behind = text[found[-1].end() :].strip()
        calls = [call for match in found for call in _calls(match[1])]
        words = f"{text[: found[0].start()].strip()}\n{behind}".strip()
        return {**rest, "role": role, "content": words, "tool_calls": calls}
    if role == "tool":
        text = re.sub(r"</?tool_response>", "", text).strip()
    return {**rest, "role": role, "content": text}


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls in a text of JSON: one, or a list.

    What is no JSON gives a call that the conversion rejects.
    """
    try:
        found: object = json.loads(text)
    except ValueError:
        found = text
    calls = cast("list[object]", found) if isinstance(found, list) else [found]
    return [{"type": "function", "function": call} for call in calls]


def _joined(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, where an assistant's words and the call that follows them are one turn."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        before = joined[-1] if joined else {}
        words = before.get("role") == "assistant" and not before.get("tool_calls")
        if words and turn.get("tool_calls") and not turn["content"]:
            joined[-1] = {**before, **turn, "content": before["content"]}
        else:
            joined.append(turn)
    return joined
