"""The only renderer. It produces the same tokens for SFT rows and for rollouts.

The model's chat template renders a conversation once. ``render`` then splits the text where a
rollout would: prompt, model turn, tool turn, model turn, ... It tokenizes each piece separately,
because a rollout never re-tokenizes the model's tokens. Training therefore sees the same token
boundaries as sampling, even if the tokenizer would merge across a split.

Some templates render an earlier turn differently once later messages follow: they drop its
thinking, or a block that the generation prompt opened. For those, ``render`` renders each turn as
the last one, and inserts between turns what a rollout writes there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from retool_mcore.data.messages import clean_messages, clean_tools, neutralise, with_call_ids
from retool_mcore.data.tokenizer import (
    HERMES_MARKUP,
    PROBE,
    ChatFormat,
    Message,
    Tool,
    chat_format,
    encode,
    encode_piece,
    has_several_templates,
    load_tokenizer,
    name_of,
    rendered,
    tokenizer_of,
)
from retool_mcore.data.tool import CALL_END, CODE_END, CODE_INTERPRETER, CODE_START, blocks, tool_call
from retool_mcore.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "HERMES_MARKUP",
    "Rendered",
    "chat_format",
    "load_tokenizer",
    "neutralise",
    "probe_call",
    "render",
    "render_prompt",
    "renders_tool_turns",
    "require_tool_turns",
    "tokenizer_of",
    "tool_turn_ids",
]

# Interpreter output of the paper's inline format. The rollout inserts it between model tokens, so
# it is a separate piece without loss.
INTERPRETER_OUTPUT = re.compile(r"(?<=</code>)\s*<interpreter>.*?</interpreter>\n?", re.DOTALL)
SPLIT = "Split the conversation at its user turns"


@dataclass(frozen=True)
class Rendered:
    """A tokenized conversation: token_ids [T], and loss_mask [T] with 1 on trained tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids)


def render(messages: Sequence[Message], tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Tokenize a conversation and compute its loss mask.

    loss_mask is 1 on assistant text, tool calls and the closing <|im_end|>. It is 0 on headers,
    system, user and tool turns, on <interpreter> spans inside an assistant turn, on the line break
    after <|im_end|>, and on a turn with ``weight`` 0. The token ids equal those of a rollout
    (``render_prompt``, the model's tokens, ``tool_turn_ids``, ...);
    tests/unit/numerics/test_chat.py checks this for every supported template style.

    Raises DataError for a message that is neither text nor a tool call, that contains a control
    token, or that the template renders differently once later user turns follow (Qwen3 drops the
    thinking of earlier user turns).
    """
    fmt = chat_format(tokenizer)
    messages, tools = clean_messages(messages, fmt), clean_tools(tools, fmt)
    trained = [message.pop("weight", 1) for message in messages]
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        require_tool_turns(tokenizer)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    pieces = _whole(messages, tools, tokenizer, trained) or _turn_by_turn(messages, tools, tokenizer, trained)
    for text, loss in pieces:
        ids = encode_piece(tokenizer, text) if token_ids else encode(tokenizer, text)
        token_ids.extend(ids)
        loss_mask.extend([loss] * len(ids))
    return Rendered(token_ids, loss_mask)


Pieces = list[tuple[str, int]]  # text, and its loss mask (0 or 1)


def _whole(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[int],
) -> Pieces:
    """Render the conversation once and split it.

    Returns [] if the text does not start with the prompt of one of its turns.
    """
    fmt = chat_format(tokenizer)
    if fmt.added:
        return []
    text = rendered(tokenizer, messages, tools, add_generation_prompt=False)
    pieces: Pieces = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = rendered(tokenizer, messages[:index], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            return []
        end = _end_of_turn(text, len(prompt), index, fmt)
        pieces.append((text[done : len(prompt)], 0))
        pieces += _model_turn(message, text[len(prompt) : end], index, trained[index])
        pieces.append((fmt.end_of_turn, trained[index]))
        done = end + len(fmt.end_of_turn)
    return [piece for piece in (*pieces, (text[done:], 0)) if piece[0]]


def _turn_by_turn(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[int],
) -> Pieces:
    """Render the conversation piece by piece, as a rollout does."""
    fmt = chat_format(tokenizer)
    pieces: Pieces = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = rendered(tokenizer, messages[:index], tools, add_generation_prompt=True)
        if prompt.startswith(done):
            between = prompt[len(done) :]
        else:
            results = [each["content"] for each in _tools_before(messages, index)]
            if not results:
                raise DataError(
                    f"message {index} (assistant): the chat template renders what precedes it differently once later "
                    f"messages follow, so training would not see what sampling saw. {SPLIT}"
                )
            between = _between(tokenizer, results)[len(fmt.end_of_turn) :]
        turn = _turn_alone(messages[: index + 1], prompt, tools, tokenizer)
        pieces.append((between, 0))
        pieces += _model_turn(message, turn, index, trained[index])
        pieces.append((fmt.end_of_turn, trained[index]))
        done = "".join([done, between, turn, "" if fmt.added else fmt.end_of_turn])
    return [piece for piece in (*pieces, (fmt.after, 0)) if piece[0]]


def _tools_before(messages: Sequence[Message], index: int) -> list[Message]:
    """The tool messages right before an assistant turn, if an assistant turn precedes them."""
    found = list(takewhile(lambda message: message["role"] == "tool", reversed(messages[:index])))
    return found[::-1] if messages[index - len(found) - 1]["role"] == "assistant" else []


def _turn_alone(
    messages: Sequence[Message], prompt: str, tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text of the last message as the model samples it after ``prompt``, without its end."""
    fmt, index = chat_format(tokenizer), len(messages) - 1
    text = rendered(tokenizer, messages, tools, add_generation_prompt=False)
    header = prompt.removesuffix(fmt.opened) if fmt.opened else prompt
    if not text.startswith(header):
        raise DataError(
            f"message {index} (assistant): the chat template writes the turn otherwise than its prompt begins it, with "
            f"{text[len(header) - 40 : len(header)]!r} for {header[-40:]!r}"
        )
    turn = text[len(header) : _end_of_turn(text, len(header), index, fmt)]
    if not fmt.opened:
        return turn
    if text.startswith(prompt):
        return turn[len(fmt.opened) :]
    if "</think>" in fmt.opened or "</think>" in turn:
        return turn.lstrip("\n").removeprefix("<think>").lstrip("\n") if "</think>" in turn else turn
    return f"{_thought(messages[-1])}\n</think>\n\n{turn.lstrip()}"  # the prompt opens <think>, so the model closes it


def _thought(message: Message) -> str:
    content = message["content"]
    within = content.split("</think>")[0].split("<think>")[-1] if "</think>" in content else ""
    return (message.get("reasoning_content") or within).strip("\n")


def _end_of_turn(text: str, start: int, index: int, fmt: ChatFormat) -> int:
    """The offset at which the turn from ``start`` ends.

    If the template has no end-of-turn token, the turn ends with the text.
    """
    end = len(text) - len(fmt.after) if fmt.added else text.find(fmt.end_of_turn, start)
    if end < start or (fmt.added and not text.endswith(fmt.after)):
        raise DataError(f"message {index} (assistant): the template does not close the turn by {fmt.end_of_turn}")
    return end


def _model_turn(message: Message, turn: str, index: int, trained: int) -> Iterator[tuple[str, int]]:
    """A turn's pieces: the model's text, and the interpreter outputs that a rollout inserts."""
    if not trained:
        yield turn, 0
        return
    _require_whole(message, turn, index)
    _require_calls_end_once(message, turn, index)
    done = 0
    for output in INTERPRETER_OUTPUT.finditer(turn):
        yield turn[done : output.start()], 1
        yield turn[output.start() : output.end()], 0
        done = output.end()
    yield turn[done:], 1


def _require_whole(message: Message, turn: str, index: int) -> None:
    parts = [message.get("reasoning_content", ""), *message["content"].replace("<think>", "").split("</think>")]
    lost = next((part.strip() for part in parts if part.strip() not in turn), None)
    if lost is None:
        return
    why = f"Qwen3 drops the thinking of earlier user turns). {SPLIT}"
    if "tool_calls" in message and lost in message["content"]:
        why = "those of Llama 3 and Mistral drop words before a call). Use retool data sft --protocol retool"
    raise DataError(
        f"message {index} (assistant): the chat template leaves out {lost[:80]!r}, which the model sampled ({why}"
    )


def _require_calls_end_once(message: Message, turn: str, index: int) -> None:
    """Raise DataError if code contains its call's end tag: a rollout would cut the call there."""
    calls: Sequence[Any] = message.get("tool_calls") or ()
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
    """Token ids [T] of a prompt, including the header of the assistant turn to sample."""
    fmt = chat_format(tokenizer)
    messages, tools = clean_messages(messages, fmt), clean_tools(tools, fmt)
    if any(message["role"] == "assistant" for message in messages):
        raise DataError("a prompt holds no assistant turn; sampled turns are continued by their own token ids")
    if tools:
        require_tool_turns(tokenizer)
    return encode(tokenizer, rendered(tokenizer, messages, tools, add_generation_prompt=True))


def tool_turn_ids(
    tokenizer: PreTrainedTokenizerBase, content: str | Sequence[str], call_ids: Sequence[str] = ()
) -> list[int]:
    """Token ids [T] after the closing </tool_call>: <|im_end|>, results, the next turn's header.

    ``content``: one tool output, or several for one turn. The chat template renders them, so a
    rollout gets the same tokens as ``render``. ``neutralise`` breaks up markup in an output, so
    code cannot forge turns. ``call_ids``: the ids of the model's calls, for templates that use
    them.
    """
    require_tool_turns(tokenizer)
    results = [content] if isinstance(content, str) else list(content)
    fmt = chat_format(tokenizer)
    return encode_piece(tokenizer, _between(tokenizer, [neutralise(text, fmt) for text in results], call_ids))


def _between(tokenizer: PreTrainedTokenizerBase, results: Sequence[str], call_ids: Sequence[str] = ()) -> str:
    """The template's text from the end of a turn with calls to the start of the next model turn."""
    calls = [tool_call(PROBE) for _ in results]
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": text} for text in results),
    ]
    # With several templates, transformers uses the "tool_use" one only if tools are passed.
    tools = [CODE_INTERPRETER] if has_several_templates(tokenizer) else None
    text = rendered(tokenizer, with_call_ids(messages, call_ids), tools, add_generation_prompt=True)
    end_of_turn = chat_format(tokenizer).end_of_turn
    end = text.find(end_of_turn, text.find(PROBE))
    if PROBE not in text or end < 0:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} does not end a turn with calls by {end_of_turn!r}, as it "
            f"ends others. {_INLINE}"
        )
    return text[end:]


@lru_cache(maxsize=8)
def probe_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """A rendered turn with one call of ``print(1)\\n``, without its end-of-turn token.

    Raises CheckpointError, see ``require_tool_turns``.
    """
    messages: list[Message] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("print(1)\n")]},
    ]
    if chat_format(tokenizer).added:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends a turn by no token, so renders no tool turns. {_INLINE}"
        )
    try:
        prompt = rendered(tokenizer, messages[:1], [CODE_INTERPRETER], add_generation_prompt=True)
        turn = _turn_alone(with_call_ids(messages), prompt, [CODE_INTERPRETER], tokenizer)
        between = _between(tokenizer, ["retool-result\n"]) if "print(1)" in turn else ""
    except DataError as error:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} renders no tool turns, which protocols with tool messages "
            f"need: {error}. {_INLINE}"
        ) from error
    if "print(1)" not in turn:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} renders a tool call as {turn!r}, without its code: it has no "
            f"tool calls. {_INLINE}"
        )
    if "retool-result" not in between:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} drops tool messages, or changes them: what the "
            f"interpreter prints would not reach the model. {_INLINE}"
        )
    return turn


_INLINE = 'Use rollout.protocol = "retool", or a template with tool turns (model.chat_template = "chatml" is one)'


def require_tool_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the template renders tool calls and results, in whatever format.

    The protocol checks the format. Raises CheckpointError with the text that the template renders
    instead. A template without tool turns only supports protocol "retool" and text-only runs.
    """
    probe_call(tokenizer)


@lru_cache(maxsize=8)  # also caches failures; probe_call, which raises, does not
def renders_tool_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``require_tool_turns`` would accept the template. Cached per tokenizer."""
    try:
        require_tool_turns(tokenizer)
    except CheckpointError:
        return False
    return True
