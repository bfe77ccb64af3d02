"""Normalises and checks messages before a chat template renders them.

SFT data, RL prompts and evaluation all use it. Every key with a meaning is either used or rejected;
none is dropped silently.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.layouts import MEDIA
from retool_mcore.data.tokenizer import ChatFormat, Message, Tool
from retool_mcore.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system", "function": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys for whether to train on an assistant turn: OpenAI's name, then other trainers' names.
TRAINED = ("weight", "loss", "train", "trainable")
REFUSED = {  # unsupported keys that change what the model sees, and the reason
    **dict.fromkeys(MEDIA, "models are trained on text alone"),
    "prefix": "a turn that the model completes is not supported",
}
PARTS_OF_TEXT = ("text", "output_text", "input_text")


def unified(message: Message, where: str) -> dict[str, Any]:
    """Normalise a message: string content, ``reasoning_content``, ``weight`` 0 or 1, known roles.

    Drops nulls, which columnar files add. Raises DataError for an unsupported key or value.
    """
    turn = {key: value for key, value in message.items() if value is not None}
    role = turn.get("role")
    turn["role"] = role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    for key, why in REFUSED.items():
        if turn.pop(key, None):
            raise DataError(f"{where}: the message has {key}, and {why}. Leave the row out")
    if turn.get("name") and role not in ("tool", None):
        raise DataError(
            f"{where} ({role}): name = {turn['name']!r:.80} would not reach the model. Put it into the text, or remove "
            "it"
        )
    if (content := turn.get("content")) is not None:
        turn["content"] = _one_text(content)
    _unify_reasoning(turn, where)
    _unify_weight(turn, where)
    if _is_mapping(call := turn.pop("function_call", None)) and not turn.get("tool_calls"):
        turn["tool_calls"] = [{"type": "function", "function": dict(call)}]
    return turn


def _one_text(content: Any) -> Any:
    """Join content parts if all of them are text; return other content unchanged."""
    if not isinstance(content, list):
        return content
    parts = cast("list[Any]", content)
    texts = [part.get("text") for part in parts if _is_mapping(part) and part.get("type") in PARTS_OF_TEXT]
    return "\n".join(map(str, texts)) if parts and len(texts) == len(parts) else parts


def _unify_reasoning(turn: dict[str, Any], where: str) -> None:
    given = {key: value for key in REASONING if (value := turn.pop(key, None))}
    if not given:
        return
    if wrong := [f"{key} is {value!r:.80}" for key, value in given.items() if not isinstance(value, str)]:
        raise DataError(f"{where}: {wrong[0]}, not a text")
    if len(set(given.values())) > 1:
        raise DataError(f"{where}: {' and '.join(given)} differ. Keep one of them")
    if turn["role"] != "assistant":
        raise DataError(f"{where} ({turn['role']}): only an assistant has {next(iter(given))}")
    turn["reasoning_content"] = next(iter(given.values()))


def _unify_weight(turn: dict[str, Any], where: str) -> None:
    given = {key: value for key in TRAINED if (value := turn.pop(key, None)) is not None}
    for key, value in given.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key} = {value!r:.80}. A turn is trained on (1) or not (0)")
    weights = {int(value) for value in given.values()}
    if len(weights) > 1:
        raise DataError(f"{where}: {' and '.join(given)} contradict each other")
    if not weights:
        return
    if turn["role"] == "assistant":
        turn["weight"] = weights.pop()
    elif weights == {1}:
        raise DataError(f"{where} ({turn['role']}): {next(iter(given))} = 1, but only assistant turns are trained on")


def in_order_of_calls(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort the results of parallel calls into the order of the calls, by call id.

    Results without ids keep their place. Raises DataError for a result with an unknown id or name,
    and for two results with the same id.
    """
    ordered = [dict(turn) for turn in turns]
    for position, turn in enumerate(ordered):
        if turn.get("role") != "assistant" or not isinstance(turn.get("tool_calls"), Sequence):
            continue
        calls = [call for call in turn["tool_calls"] if _is_mapping(call)]
        ids = [call.get("id") for call in calls]
        end = position + 1
        while end < len(ordered) and ordered[end].get("role") == "tool":
            end += 1
        results = ordered[position + 1 : end]
        names = [function.get("name") for call in calls if _is_mapping(function := call.get("function"))]
        if strange := next((name for each in results if (name := each.get("name")) and name not in names), None):
            raise DataError(
                f"message {position}: a result has name {strange!r:.80}, and the calls are of {names!r:.200}"
            )
        given = [result.get("tool_call_id") for result in results]
        if None in given or None in ids or not given or len(set(ids)) < len(ids):
            continue
        if twice := next((each for each in given if given.count(each) > 1), None):
            raise DataError(f"message {position}: two results have tool_call_id {twice!r:.80}. Keep one of them")
        if strange := next((each for each in given if each not in ids), None):
            raise DataError(
                f"message {position}: a result has tool_call_id {strange!r:.80}, and the calls have "
                f"{', '.join(map(repr, ids))[:200]}"
            )
        ordered[position + 1 : end] = sorted(results, key=lambda result: ids.index(result["tool_call_id"]))
    return ordered


def clean_messages(messages: Sequence[Message], fmt: ChatFormat) -> list[dict[str, Any]]:
    """Normalise messages (see ``unified``) and check their contents and order.

    Call arguments become mappings. Raises DataError, for example if an assistant or tool turn comes
    first.
    """
    turns = in_order_of_calls([unified(message, f"message {index}") for index, message in enumerate(messages)])
    clean = [_clean_message(message, index, fmt) for index, message in enumerate(turns)]
    if problem := order_problem(clean):
        raise DataError(problem)
    return with_call_ids(clean)


def order_problem(turns: Sequence[Mapping[str, Any]]) -> str | None:
    """The error in the order of turns, or None.

    The first turn after any system turns must be a user turn. Each call must have one result right
    after its turn, except for the calls of the last turn.
    """
    first = next((turn["role"] for turn in turns if turn["role"] != "system"), "user")
    if first != "user":
        return f"the conversation begins with a turn of role {first!r}, where a user turn is due"
    calls = results = 0
    for index, turn in enumerate(turns):
        if turn["role"] == "tool":
            results += 1
            if results > calls:
                return f"message {index} (tool): a result without a call before it"
            continue
        if results < calls:
            return f"message {index} ({turn['role']}): {calls} calls before it have {results} results"
        calls, results = len(turn.get("tool_calls") or ()), 0
    return f"the last {calls} calls have {results} results" if 0 < results < calls else None


def with_call_ids(messages: Sequence[Message], call_ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Add an id to each call and its result, because some templates require ids.

    ``call_ids``: ids for the first calls of each turn. Other calls get a number from 0 in each
    turn, as nine letters and digits ("call00000"), which Mistral's templates require. Templates
    that do not render ids ignore them.
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
        _refuse_specials(reasoning, f"message {index} ({role})", fmt)
        clean["reasoning_content"] = reasoning
    if calls is not None:
        if role != "assistant":
            raise DataError(f"message {index} ({role}): only an assistant makes tool calls")
        clean["tool_calls"] = [_clean_call(call, f"message {index}, call {n}", fmt) for n, call in enumerate(calls)]
    if "weight" in message:
        clean["weight"] = message["weight"]
    return clean


def _clean_call(call: Any, where: str, fmt: ChatFormat) -> dict[str, Any]:
    function = call.get("function") if _is_mapping(call) else None
    if not _is_mapping(function) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call is {{function: {{name, arguments}}}}, this one is {call!r:.200}")
    arguments = arguments_of(function, where)
    _refuse_specials(json.dumps(arguments, ensure_ascii=False), where, fmt)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def arguments_of(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call's arguments as a mapping without nulls; decodes JSON text. Raises DataError."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: arguments are not JSON: {error}") from error
    if not _is_mapping(arguments):
        raise DataError(f"{where}: arguments are {type(arguments).__name__}, not a mapping")
    return {key: value for key, value in arguments.items() if value is not None}


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _refuse_specials(text: str, where: str, fmt: ChatFormat) -> None:
    normal = fmt.normalised(text)
    found = next((token for token in fmt.specials if token in text or fmt.normalised(token) in normal), None)
    if found is not None:
        raise DataError(f"{where}: the text contains the control token {found}, which would end or forge a turn")


def neutralise(content: str, fmt: ChatFormat) -> str:
    """Break up turn and tool markup in a tool's output: "<|im_end|>" becomes "< |im_end|>".

    A tool's output thus cannot forge a turn or a call.
    """
    text = content.encode("utf-8", "replace").decode("utf-8")  # replaces lone surrogates, which tokenizers reject
    normal = fmt.normalised(text)
    if normal != text and len(fmt.markup.findall(normal)) > len(fmt.markup.findall(text)):
        text = normal
    return fmt.markup.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def clean_tools(tools: Sequence[Tool] | None, fmt: ChatFormat) -> list[dict[str, Any]] | None:
    """Break up markup in tool schemas, because an MCP server's descriptions are untrusted."""
    return [_neutral(tool, fmt) for tool in tools] if tools else None


def _neutral(value: object, fmt: ChatFormat) -> Any:
    if isinstance(value, str):
        return neutralise(value, fmt)
    if isinstance(value, Mapping):
        return {_neutral(key, fmt): _neutral(item, fmt) for key, item in cast("Mapping[Any, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_neutral(item, fmt) for item in cast("Sequence[object]", value)]
    return value


def parse_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Parse the ``tools`` column: a list of schemas, the same list as a JSON string, or null.

    Drops the nulls that parquet adds to unify structs.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}, column tools: not JSON: {error}") from error
    if value is None or value == []:
        return None
    if not is_tables(value) or not all("function" in tool for tool in value):
        raise DataError(f"{where}, column tools: {value!r:.120} is not a list of function schemas")
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: object) -> Any:
    if is_table(value):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
