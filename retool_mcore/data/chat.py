"""The only renderer: it turns SFT rows and rollouts into the same tokens.

The model's own chat template renders a conversation once, and the text is cut where a rollout is
cut: prompt, model turn, tool turn, model turn, ... Each piece is encoded alone, as in a rollout,
which never re-encodes the model's tokens. So training sees the token boundaries that sampling sees,
even with tokenizers that would merge across a cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from retool_mcore.data.call_tags import blocks
from retool_mcore.data.tokenizer import apply_template, decode, encode, from_pretrained, name_of
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_INTERPRETER, CODE_START, tool_call
from retool_mcore.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
# Markup that structures a hermes conversation whether or not the tokenizer has tokens for it.
HERMES_MARKUP = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
# The paper's inline form: the rollout writes it between the model's tokens, and it is cut there.
INTERPRETER_OUTPUT = re.compile(r"(?<=</code>)\s*<interpreter>.*?</interpreter>\n?", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """A tokenized conversation: token_ids [T], and loss_mask [T] with 1 on the trained tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ChatFormat:
    """What the template puts between turns, found by rendering probes; see ``chat_format``."""

    end_of_turn: str  # "<|im_end|>", one token
    end_of_turn_id: int
    specials: tuple[str, ...]  # tokens that no message may contain
    markup: re.Pattern[str]  # markup that a tool's output must not be able to forge


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a local model directory or hub name.

    Raises CheckpointError naming the path.
    """
    try:
        tokenizer = from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        state = "is no tokenizer" if Path(path).is_dir() else "is neither a directory here nor a hub name"
        raise CheckpointError(f"model.path = {path} {state} that can be read: {_first_line(error)}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(f"the tokenizer in {path} has no chat template. Use an instruct model's tokenizer")
    return tokenizer


def render(messages: Sequence[Message], tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Tokenize a conversation and mark the tokens the model is trained on.

    loss_mask is 1 on assistant text, tool calls and the closing <|im_end|>, 0 on headers, system,
    user and tool turns, on <interpreter> spans inside an assistant turn, and on the line break
    after <|im_end|>. The ids equal those of rendering turn by turn (``render_prompt``, the model's
    tokens, ``tool_turn_ids``, ...); tests/numerics/test_chat.py checks this for every template
    style that we support.

    Raises DataError for a message that is neither text nor a tool call, that holds a control token,
    or that the template renders differently once later messages follow (Qwen3 drops the thinking of
    earlier user turns).
    """
    fmt = chat_format(tokenizer)
    messages = clean_messages(messages, fmt)
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        require_tool_turns(tokenizer)
    text = _template(tokenizer, messages, tools, add_generation_prompt=False)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    done = 0

    def append(upto: int, loss: int) -> None:
        nonlocal done
        ids = encode(tokenizer, text[done:upto])
        token_ids.extend(ids)
        loss_mask.extend([loss] * len(ids))
        done = upto

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _template(tokenizer, messages[:index], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise DataError(
                f"message {index} (assistant): the chat template renders what precedes it differently once later "
                "messages follow, so training would not see what sampling saw. Split the conversation at its user turns"
            )
        end = text.find(fmt.end_of_turn, len(prompt))
        if end < 0:
            raise DataError(f"message {index} (assistant): the template does not close the turn by {fmt.end_of_turn}")
        _require_whole(message, text[len(prompt) : end], index)
        _require_calls_end_once(message, text[len(prompt) : end], index)
        append(len(prompt), loss=0)
        for output in INTERPRETER_OUTPUT.finditer(text, len(prompt), end):
            append(output.start(), loss=1)
            append(output.end(), loss=0)
        append(end + len(fmt.end_of_turn), loss=1)
    append(len(text), loss=0)
    return Rendered(token_ids, loss_mask)


def _require_whole(message: Message, turn: str, index: int) -> None:
    parts = [message.get("reasoning_content", ""), *message["content"].replace("<think>", "").split("</think>")]
    lost = next((part.strip() for part in parts if part.strip() not in turn), None)
    if lost is not None:
        raise DataError(
            f"message {index} (assistant): the chat template leaves out {lost[:80]!r}, which the model sampled (Qwen3 "
            "drops the thinking of earlier user turns). Split the conversation at its user turns"
        )


def _require_calls_end_once(message: Message, turn: str, index: int) -> None:
    """Code that holds the tag which ends its call would be cut there by a rollout."""
    calls: list[Any] = message.get("tool_calls") or []
    outputs = len(INTERPRETER_OUTPUT.findall(turn))
    ends = sum(block.closed for block in blocks(turn, CODE_START, CODE_END)) if outputs else 0
    cut = CALL_END in turn and any(CALL_END in json.dumps(call) for call in calls)
    tag = CALL_END if cut else CODE_END if ends > outputs else None
    if tag is not None:
        raise DataError(
            f"message {index} (assistant): its code holds {tag}, where a rollout would end the call, or a call has no "
            "output after it. Leave the row out"
        )


def render_prompt(
    messages: Sequence[Message], tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Token ids [T] of a conversation, up to the header of the assistant turn to be sampled."""
    messages = clean_messages(messages, chat_format(tokenizer))
    if any(message["role"] == "assistant" for message in messages):
        raise DataError("a prompt holds no assistant turn; sampled turns are continued by their own token ids")
    if tools:
        require_tool_turns(tokenizer)
    return encode(tokenizer, _template(tokenizer, messages, tools, add_generation_prompt=True))


def tool_turn_ids(tokenizer: PreTrainedTokenizerBase, content: str | Sequence[str]) -> list[int]:
    """The tokens after the model's closing </tool_call>: <|im_end|>, results, next turn's header.

    ``content`` is one interpreter output, or several for one turn. The tokens come from the chat
    template, so a rollout has the tokens of the one-shot rendering. Markup inside an output is
    broken up (``neutralise``), so code cannot forge turns.
    """
    require_tool_turns(tokenizer)
    fmt = chat_format(tokenizer)
    results = [content] if isinstance(content, str) else list(content)
    mark = "retool-probe"
    calls = [tool_call(mark) for _ in results]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": neutralise(text, fmt)} for text in results]
    text = _template(tokenizer, messages, None, add_generation_prompt=True)
    return encode(tokenizer, text[text.index(fmt.end_of_turn, text.index(mark)) :])


def neutralise(content: str, fmt: ChatFormat) -> str:
    """Break up turn and tool markup in a tool's output: "<|im_end|>" becomes "< |im_end|>"."""
    text = content.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which tokenizers refuse
    return fmt.markup.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


@lru_cache(maxsize=8)
def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Find the template's turn ending. Cached per tokenizer.

    Raises CheckpointError when the template does not close a turn by a control token. Tool turns
    are asked of it by ``require_tool_turns``, where they are rendered.
    """
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token).strip()) > 1]
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "retool-probe"}]
    text = _template(tokenizer, probe, None, add_generation_prompt=False)
    after = text[text.index("retool-probe") + len("retool-probe") :]
    first_id = encode(tokenizer, after)[:1]
    end_of_turn = decode(tokenizer, first_id)
    if end_of_turn not in added or not after.startswith(end_of_turn):
        raise CheckpointError(
            f"the chat template closes an assistant turn by {after!r}, which does not start with a control token of "
            "the tokenizer. A template of the ChatML style (Qwen) is needed"
        )
    markup = re.compile("|".join(re.escape(token) for token in sorted({*added, *HERMES_MARKUP}, key=len, reverse=True)))
    return ChatFormat(
        end_of_turn, first_id[0], tuple(dict.fromkeys((*tokenizer.all_special_tokens, *specials, end_of_turn))), markup
    )


@lru_cache(maxsize=8)
def require_tool_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the template renders tool calls and results as protocol hermes needs them.

    Raises CheckpointError with what it renders instead. A template without tool turns serves
    protocol "retool" and text alone.
    """
    fmt = chat_format(tokenizer)
    call = tool_call("print(1)\n")
    messages: list[Message] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "retool-probe\n"},
    ]
    try:
        text = _template(tokenizer, messages, [CODE_INTERPRETER], add_generation_prompt=True)
        prompt = _template(tokenizer, messages[:2], [CODE_INTERPRETER], add_generation_prompt=True)
    except DataError as error:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} renders no tool turns, which rollout.protocol = "
            f'"hermes" needs: {error}. Use rollout.protocol = "retool", or a Qwen2.5-style template'
        ) from error
    turn = text[len(prompt) : text.find(fmt.end_of_turn, len(prompt))]
    if not text.startswith(prompt) or not turn.endswith("</tool_call>") or '"code": "print(1)\\n"' not in turn:
        raise CheckpointError(
            f"the chat template renders a tool call as {turn!r}, not in the hermes form "
            '<tool_call>\\n{...}\\n</tool_call> that rollout.protocol = "hermes" needs. Use '
            'rollout.protocol = "retool", or a Qwen2.5-style template'
        )
    if "retool-probe\n" not in text:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} drops tool messages, or changes them: what the "
            'interpreter prints would not reach the model. Use rollout.protocol = "retool", or a Qwen2.5-style template'
        )


@lru_cache(maxsize=8)
def renders_tool_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``require_tool_turns`` would accept the template. Cached per tokenizer."""
    try:
        require_tool_turns(tokenizer)
    except CheckpointError:
        return False
    return True


def clean_messages(messages: Sequence[Message], fmt: ChatFormat) -> list[dict[str, Any]]:
    """Check messages and unify them: drop nulls of columnar files, make call arguments mappings."""
    return [_clean_message(message, index, fmt) for index, message in enumerate(messages)]


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


def _template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    from jinja2 import TemplateError

    try:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
