r"""Conversations with tool calls, in OpenAI's form or ShareGPT's, as messages in OpenAI's form.

ShareGPT's turns are {from, value}. A call is a turn of its own (``function_call``, JSON) or stands
in the assistant's text between ``<tool_call>`` tags.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.layouts import example
from retool_mcore.errors import DataError

COLUMNS = ("messages", "conversations")
OPTION = "--messages names the column of the conversation: a list of {role, content} or of {from, value}"
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
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
    """Turns in OpenAI's form, each result behind its call; other values as they are."""
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError:
            return turns
    if not is_tables(turns):
        return turns
    if turns and all("from" in turn and "value" in turn for turn in turns):
        turns = _joined([_of_sharegpt(turn) for turn in turns])
    turns = [_of_openai(turn) for turn in turns]
    return _results_in_order(turns)


def _of_openai(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn with one text for its parts, the one call of ``function_call``, and known roles."""
    plain = dict(turn)
    if turn.get("role") == "developer":
        plain["role"] = "system"
    content = turn.get("content")
    if is_tables(content) and all(part.get("type") in ("text", "output_text", "input_text") for part in content):
        plain["content"] = "\n".join(str(part.get("text", "")) for part in content)
    if is_table(call := turn.get("function_call")) and not turn.get("tool_calls"):
        plain.pop("function_call")
        plain["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if turn.get("role") == "function":
        plain["role"] = "tool"
    return plain


def _of_sharegpt(turn: Mapping[str, Any]) -> dict[str, Any]:
    said, text = turn["from"], turn["value"]
    role = ROLES.get(said, said) if isinstance(said, str) else said
    if not isinstance(text, str):
        return {"role": role, "content": text}
    if said == "function_call":
        return {"role": role, "content": "", "tool_calls": _calls(text)}
    if role == "assistant" and (found := list(_CALL.finditer(text))):
        rest = text[found[-1].end() :].strip()
        calls = [call for match in found for call in _calls(match[1])]
        return {"role": role, "content": f"{text[: found[0].start()].strip()}\n{rest}".strip(), "tool_calls": calls}
    if role == "tool":
        text = re.sub(r"</?tool_response>", "", text).strip()
    return {"role": role, "content": text}


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
            joined[-1] = {**turn, "content": before["content"]}
        else:
            joined.append(turn)
    return joined


def _results_in_order(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, with the results of parallel calls in the order of the calls, by their ids."""
    ordered = list(turns)
    for position, turn in enumerate(ordered):
        calls = turn.get("tool_calls")
        ids = [call.get("id") for call in calls] if is_tables(calls) else []
        results = ordered[position + 1 : position + 1 + len(ids)]
        by_id = {result.get("tool_call_id"): result for result in results if is_table(result)}
        if ids and None not in ids and len(set(ids)) == len(ids) and set(by_id) == set(ids):
            ordered[position + 1 : position + 1 + len(ids)] = [by_id[each] for each in ids]
    return ordered
