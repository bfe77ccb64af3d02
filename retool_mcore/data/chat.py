"""The only renderer: it turns conversations into tokens, the same for SFT rows and for rollouts.

A conversation passes three stages:

1. ``clean_messages`` normalises the messages. Every key with a meaning is used or rejected.
2. ``render_text`` applies the tokenizer's chat template. ``chat_format`` finds out once per
   tokenizer how the template ends and starts turns.
3. ``render`` tokenizes the text in the pieces of a rollout: prompt, model turn, tool turn, model
   turn, ... A rollout never re-tokenizes the model's tokens, so training sees the same token
   boundaries as sampling, even if the tokenizer would merge across a split.

Some templates render an earlier turn differently once later messages follow: they drop its
thinking, or a block that the generation prompt opened. For these templates, ``render`` renders each
turn as the last one, and inserts between turns the text that a rollout writes there.
"""

# transformers is only partly typed.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from retool_mcore.config.base import is_table, is_tables
from retool_mcore.data.layouts import MEDIA
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_INTERPRETER, CODE_START, blocks, tool_call
from retool_mcore.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Markup of the Hermes format, which the tokenizer may or may not have tokens for.
HERMES_MARKUP = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
PROBE = "retool-probe"
_SHOWN = 60  # characters of a difference to show in an error
# Interpreter output of the paper's inline format. The rollout inserts it between model tokens, so
# it is a separate piece without loss.
INTERPRETER_OUTPUT = re.compile(r"(?<=</code>)\s*<interpreter>.*?</interpreter>\n?", re.DOTALL)
SPLIT = "Split the conversation at its user turns"
_INLINE = 'Use rollout.protocol = "retool", or a template with tool turns (model.chat_template = "chatml" is one)'

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system", "function": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")
# Keys for whether to train on an assistant turn: OpenAI's name, then other trainers' names.
TRAINED = ("weight", "loss", "train", "trainable")
REFUSED = {  # unsupported keys that change what the model sees, and the reason
    **dict.fromkeys(MEDIA, "models are trained on text only"),
    "prefix": "a turn that the model completes is not supported",
}
PARTS_OF_TEXT = ("text", "output_text", "input_text")


@dataclass(frozen=True)
class TokenizedChat:
    """A tokenized conversation: token_ids [T], and loss_mask [T] with 1 on trained tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    def compact(self) -> TokenizedChat:
        """The same in 5 bytes per token; lists of ints take nine times as much."""
        return TokenizedChat(array("i", self.token_ids), array("b", self.loss_mask))


def render(
    messages: Sequence[Message], tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase
) -> TokenizedChat:
    """Tokenize a conversation and compute its loss mask.

    loss_mask is 1 on assistant text, tool calls and the closing <|im_end|>. It is 0 on headers, on
    system, user and tool turns, on <interpreter> spans inside an assistant turn, on the line break
    after <|im_end|>, and on a turn with ``weight`` 0. The token ids equal those of a rollout
    (``render_prompt``, the model's tokens, ``tool_turn_ids``, ...);
    tests/unit/numerics/test_chat.py checks this for every supported template style.

    Raises DataError for a message that is neither text nor a tool call, that contains a control
    token, or that the template renders differently once later user turns follow (Qwen3 drops the
    thinking before the last user turn).
    """
    fmt = chat_format(tokenizer)
    messages, tools = clean_messages(messages, fmt), clean_tools(tools, fmt)
    trained = [message.pop("weight", 1) for message in messages]
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        require_tool_turns(tokenizer)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    pieces = _render_at_once(messages, tools, tokenizer, trained) or _render_turns(messages, tools, tokenizer, trained)
    for text, loss in pieces:
        ids = encode_piece(tokenizer, text) if token_ids else encode(tokenizer, text)
        token_ids.extend(ids)
        loss_mask.extend([loss] * len(ids))
    return TokenizedChat(token_ids, loss_mask)


Pieces = list[tuple[str, int]]  # text, and its loss mask (0 or 1)


def _render_at_once(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[int],
) -> Pieces:
    """Render the conversation once and split it.

    Returns [] unless the text starts with the prompt of every assistant turn.
    """
    fmt = chat_format(tokenizer)
    if fmt.lacks_end_token:
        return []
    text = render_text(tokenizer, messages, tools, add_generation_prompt=False)
    pieces: Pieces = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_text(tokenizer, messages[:index], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            return []
        end = _end_of_turn(text, len(prompt), index, fmt)
        pieces.append((text[done : len(prompt)], 0))
        pieces += _model_turn(message, text[len(prompt) : end], index, trained[index])
        pieces.append((fmt.end_of_turn, trained[index]))
        done = end + len(fmt.end_of_turn)
    return [piece for piece in (*pieces, (text[done:], 0)) if piece[0]]


def _render_turns(
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
        prompt = render_text(tokenizer, messages[:index], tools, add_generation_prompt=True)
        if prompt.startswith(done):
            between = prompt[len(done) :]
        else:
            results = [message["content"] for message in _results_before(messages, index)]
            if not results:
                raise DataError(
                    f"message {index} (assistant): the chat template renders the text before it differently once "
                    f"later messages follow, so training would not see what sampling saw. {SPLIT}"
                )
            between = _between(tokenizer, results)[len(fmt.end_of_turn) :]
        turn = _turn_alone(messages[: index + 1], prompt, tools, tokenizer)
        pieces.append((between, 0))
        pieces += _model_turn(message, turn, index, trained[index])
        pieces.append((fmt.end_of_turn, trained[index]))
        done = "".join([done, between, turn, "" if fmt.lacks_end_token else fmt.end_of_turn])
    return [piece for piece in (*pieces, (fmt.suffix, 0)) if piece[0]]


def _results_before(messages: Sequence[Message], index: int) -> list[Message]:
    """The tool messages right before an assistant turn, if an assistant turn precedes them."""
    results = list(takewhile(lambda message: message["role"] == "tool", reversed(messages[:index])))
    return results[::-1] if messages[index - len(results) - 1]["role"] == "assistant" else []


def _turn_alone(
    messages: Sequence[Message], prompt: str, tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The last message's text as the model samples it after ``prompt``, without the end of turn."""
    fmt, index = chat_format(tokenizer), len(messages) - 1
    text = render_text(tokenizer, messages, tools, add_generation_prompt=False)
    header = prompt.removesuffix(fmt.opening) if fmt.opening else prompt
    if not text.startswith(header):
        raise DataError(
            f"message {index} (assistant): in the whole conversation, the chat template renders "
            f"{text[len(header) - 40 : len(header)]!r} before the turn, but its generation prompt has "
            f"{header[-40:]!r} there"
        )
    turn = text[len(header) : _end_of_turn(text, len(header), index, fmt)]
    if not fmt.opening:
        return turn
    if text.startswith(prompt):
        return turn[len(fmt.opening) :]
    if "</think>" in fmt.opening or "</think>" in turn:
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
    end = len(text) - len(fmt.suffix) if fmt.lacks_end_token else text.find(fmt.end_of_turn, start)
    if end < start or (fmt.lacks_end_token and not text.endswith(fmt.suffix)):
        raise DataError(f"message {index} (assistant): the template does not end the turn with {fmt.end_of_turn}")
    return end


def _model_turn(message: Message, turn: str, index: int, trained: int) -> Iterator[tuple[str, int]]:
    """A turn's pieces: the model's text, and the interpreter outputs that a rollout inserts."""
    if not trained:
        yield turn, 0
        return
    _require_nothing_lost(message, turn, index)
    _require_calls_end_once(message, turn, index)
    done = 0
    for output in INTERPRETER_OUTPUT.finditer(turn):
        yield turn[done : output.start()], 1
        yield turn[output.start() : output.end()], 0
        done = output.end()
    yield turn[done:], 1


def _require_nothing_lost(message: Message, turn: str, index: int) -> None:
    parts = [message.get("reasoning_content", ""), *message["content"].replace("<think>", "").split("</think>")]
    lost = next((part.strip() for part in parts if part.strip() not in turn), None)
    if lost is None:
        return
    why = f"Qwen3's template drops the thinking before the last user turn. {SPLIT}"
    if "tool_calls" in message and lost in message["content"]:
        why = "The templates of Llama 3 and Mistral drop text before a call. Use retool data sft --protocol retool"
    raise DataError(
        f"message {index} (assistant): the chat template leaves out {lost[:80]!r}, so training would not see it. {why}"
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
            f"message {index} (assistant): its code contains {tag}, which would end the call in a rollout, or a call "
            "has no output after it. Leave the row out"
        )


def render_prompt(
    messages: Sequence[Message], tools: Sequence[Tool] | None, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Token ids [T] of a prompt, including the header of the assistant turn to sample."""
    fmt = chat_format(tokenizer)
    messages, tools = clean_messages(messages, fmt), clean_tools(tools, fmt)
    if any(message["role"] == "assistant" for message in messages):
        raise DataError("a prompt must not contain an assistant turn: a rollout keeps the model's turns as token ids")
    if tools:
        require_tool_turns(tokenizer)
    return encode(tokenizer, render_text(tokenizer, messages, tools, add_generation_prompt=True))


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
    tools = [CODE_INTERPRETER] if isinstance(cast("Any", tokenizer).chat_template, dict) else None
    text = render_text(tokenizer, with_call_ids(messages, call_ids), tools, add_generation_prompt=True)
    end_of_turn = chat_format(tokenizer).end_of_turn
    end = text.find(end_of_turn, text.find(PROBE))
    if PROBE not in text or end < 0:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends other turns with {end_of_turn!r}, but not a turn with "
            f"calls. {_INLINE}"
        )
    return text[end:]


@lru_cache(maxsize=8)
def require_tool_turns(tokenizer: PreTrainedTokenizerBase) -> str:
    """Check that the template renders tool calls and results, in whatever format.

    Returns a rendered turn with one call of ``print(1)\\n``, without its end-of-turn token. The
    protocol checks its format. Raises CheckpointError with the text that the template renders
    instead. A template without tool turns only supports protocol "retool" and text-only runs.
    """
    messages: list[Message] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("print(1)\n")]},
    ]
    if chat_format(tokenizer).lacks_end_token:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} has no end-of-turn token, so it cannot render tool turns. "
            f"{_INLINE}"
        )
    try:
        prompt = render_text(tokenizer, messages[:1], [CODE_INTERPRETER], add_generation_prompt=True)
        turn = _turn_alone(with_call_ids(messages), prompt, [CODE_INTERPRETER], tokenizer)
        between = _between(tokenizer, ["retool-result\n"]) if "print(1)" in turn else ""
    except DataError as error:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} cannot render tool turns, which protocols with tool messages "
            f"need: {error}. {_INLINE}"
        ) from error
    if "print(1)" not in turn:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} renders a tool call as {turn!r}, without its code: it does "
            f"not support tool calls. {_INLINE}"
        )
    if "retool-result" not in between:
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} drops or changes tool messages: the interpreter's output "
            f"would not reach the model. {_INLINE}"
        )
    return turn


@lru_cache(maxsize=8)  # also caches failures; require_tool_turns, which raises, does not
def renders_tool_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``require_tool_turns`` would accept the template. Cached per tokenizer."""
    try:
        require_tool_turns(tokenizer)
    except CheckpointError:
        return False
    return True


# ---------------------------------------------------------- how the template ends and starts turns


@dataclass(frozen=True)
class ChatFormat:
    """How the template ends and starts turns; see ``chat_format``."""

    end_of_turn: str  # "<|im_end|>": a single token, possibly with whitespace before it
    end_of_turn_id: int
    suffix: str  # text after end_of_turn: a line break for ChatML
    lacks_end_token: bool  # the template has no end-of-turn token, so training and sampling use eos_token
    opening: str  # text after the header that only a generation prompt has: "<think>\n" for R1
    specials: tuple[str, ...]  # tokens that no message may contain
    markup: re.Pattern[str]  # markup that a tool's output must not forge
    # The tokenizer's normaliser for added tokens. Some fold case or full-width letters.
    normalised: Callable[[str], str] = str


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The end-of-turn token and its id. Raises CheckpointError."""
    fmt = chat_format(tokenizer)
    return fmt.end_of_turn.strip(), fmt.end_of_turn_id


@lru_cache(maxsize=8)
def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Find out how the template ends and starts a turn. Cached per tokenizer.

    If the template has no end-of-turn token, the tokenizer's eos_token is used. Raises
    CheckpointError if there is no eos_token either, or if the conversation does not start with the
    prompt of its last turn; the message has a minimal example. ``chat.require_tool_turns`` checks
    tool turns separately.
    """
    added_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token).strip()) > 1]
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
    try:
        prompt = render_text(tokenizer, [question], None, add_generation_prompt=True)
        text = render_text(tokenizer, [question, answer], None, add_generation_prompt=False)
    except DataError as error:
        raise CheckpointError(f"{error}. The conversation was one user turn and its answer") from error
    if PROBE not in text:
        raise CheckpointError(f"the chat template renders an assistant turn as {text!r}, without its content")
    suffix = text[text.index(PROBE) + len(PROBE) :]
    opening = _prompt_opening(prompt, text)
    _require_exact(tokenizer, prompt, text)
    blank = suffix[: len(suffix) - len(suffix.lstrip())]
    first_id = encode_piece(tokenizer, suffix[len(blank) :])[:1]
    end_token = decode(tokenizer, first_id)
    lacks_end = not end_token.strip() or end_token not in added_tokens or not suffix.startswith(blank + end_token)
    if lacks_end:
        blank, end_token = "", _eos_of(tokenizer, suffix)
        first_id = encode_piece(tokenizer, end_token)
    normalised = _normaliser(tokenizer)
    marks = {*added_tokens, *map(normalised, added_tokens), *HERMES_MARKUP} - {""}
    _require_same_end(tokenizer, "" if lacks_end else blank + end_token)
    return ChatFormat(
        end_of_turn=blank + end_token,
        end_of_turn_id=first_id[0],
        suffix=suffix if lacks_end else suffix[len(blank + end_token) :],
        lacks_end_token=lacks_end,
        opening=opening,
        specials=tuple(dict.fromkeys((*tokenizer.all_special_tokens, *specials, end_token))),
        markup=re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len)[::-1])),
        normalised=normalised,
    )


def _eos_of(tokenizer: PreTrainedTokenizerBase, after: str) -> str:
    token = tokenizer.eos_token
    if not isinstance(token, str) or len(encode_piece(tokenizer, token)) != 1:
        raise CheckpointError(
            f"the chat template ends an assistant turn with {after!r}, which does not start with a control token, and "
            f"the tokenizer of {name_of(tokenizer)!r} has no eos_token of one token: a rollout could not detect the end"
        )
    return token


def _normaliser(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added: Any = tokenizer.added_tokens_decoder.values()
    folds = any(bool(token.normalized) for token in added)
    normaliser: Any = getattr(backend, "normalizer", None) if folds else None
    return normaliser.normalize_str if normaliser is not None else str


def _require_same_end(tokenizer: PreTrainedTokenizerBase, end: str) -> None:
    """Raise CheckpointError if earlier assistant turns end differently from the last one.

    ``render`` looks for the next occurrence of ``end``. Without this check, it could put loss on
    text of the user. ``end``: "" for a template without an end-of-turn token.
    """
    turns = [("user", "x"), ("assistant", PROBE), ("user", "y"), ("assistant", "z")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = render_text(tokenizer, messages, None, add_generation_prompt=False)
    except DataError:
        return  # a single-turn template; rendering a longer conversation raises the error
    after = text[text.index(PROBE) + len(PROBE) :] if PROBE in text else end
    if not after.startswith(end):
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends the last assistant turn with {end!r} and an earlier one "
            f"with {after[: len(end) + 20]!r}, so a rollout could not detect where a turn ends. The shortest example "
            'is two user turns, each with an answer. Set model.chat_template ("chatml" is one)'
        )


def _prompt_opening(prompt: str, text: str) -> str:
    """The text that the prompt has after the header of a turn, such as "<think>\\n".

    Raises CheckpointError if the conversation and the prompt differ in any other way.
    """
    if text.startswith(prompt):
        return ""
    header = prompt[: _common(prompt, text)]
    opening, instead = prompt[len(header) :], text[len(header) :]
    if opening.startswith("<think>") and instead.lstrip().startswith(PROBE):
        return opening
    raise CheckpointError(
        "the chat template is not stable: a conversation does not start with the prompt of its answer, so training "
        f'would not see what sampling saw. The shortest example is a user turn "x" and its answer "{PROBE}": after '
        f"{header[-_SHOWN:]!r} the prompt continues with {opening[:_SHOWN]!r}, but the conversation with "
        f"{instead[:_SHOWN]!r}. Set model.template_args if an argument of the template controls this, or "
        "model.chat_template"
    )


def _require_exact(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> None:
    """Check that separately tokenized prompt and turn decode to the text that was rendered.

    Raises CheckpointError.
    """
    cut = _common(prompt, text)
    ids = [*encode(tokenizer, text[:cut]), *encode_piece(tokenizer, text[cut:])]
    decoded = decode(tokenizer, ids, clean_up=False)
    if decoded.removeprefix(" ") != text.removeprefix(" "):
        at = _common(decoded, text)
        raise CheckpointError(
            f"the tokenizer of {name_of(tokenizer)!r} does not reproduce what the chat template renders when turns are "
            f"tokenized separately: they decode to {decoded[at : at + _SHOWN]!r} instead of "
            f"{text[at : at + _SHOWN]!r}. Use a byte-level tokenizer"
        )


def _common(first: str, second: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


# ------------------------------------------------------- text and token ids


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The directory or hub name of the tokenizer; "" if it was created in memory."""
    return cast("str", tokenizer.name_or_path)


def set_date(tokenizer: PreTrainedTokenizerBase, day: date) -> None:
    """Set the date that templates render as today's."""
    cast("Any", tokenizer).prompt_date = day


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text, without special tokens added."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids [T] of a text that continues other tokens.

    Some SentencePiece tokenizers (Mistral's first ones) add a space before the first word. This
    function prevents it, because a later piece has no such space.
    """
    guard = _guard(tokenizer)
    return encode(tokenizer, guard + text)[1:] if guard else encode(tokenizer, text)


@lru_cache(maxsize=8)
def _guard(tokenizer: PreTrainedTokenizerBase) -> str:
    """A control token to prepend when encoding a piece; "" if the tokenizer adds no space."""
    for token in (tokenizer.bos_token, tokenizer.eos_token):
        if isinstance(token, str):
            ids = encode(tokenizer, f"{token}x")
            return token if len(encode(tokenizer, token)) == 1 and ids[1:] != encode(tokenizer, "x") else ""
    return ""


def decode(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    clean_up: bool | None = None,
    control_tokens: bool = True,
) -> str:
    """Decode token ids [T], with or without control tokens.

    ``clean_up``: whether to remove spaces before punctuation; None uses the tokenizer's setting.
    """
    skip = not control_tokens
    # An array, because transformers checks the type of each element of a list, which takes longer
    # than decoding.
    ids = np.asarray(token_ids, dtype=np.int64)
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean_up)
    assert isinstance(text, str), "one sequence decodes to one string"
    return text


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render a conversation as text, using the date of ``set_date``.

    Raises DataError if the template rejects the conversation.
    """
    from jinja2 import TemplateError

    day: date | None = getattr(tokenizer, "prompt_date", None)
    dated: dict[str, Any] = {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **dated,
        )
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template rejects the conversation: {error}") from error
    assert isinstance(text, str), "apply_chat_template(tokenize=False) of one conversation gives one string"
    return text


# ------------------------------------------------------- messages


def _normalised_message(message: Message, where: str) -> dict[str, Any]:
    """Normalise a message: string content, ``reasoning_content``, ``weight`` 0 or 1, known roles.

    Drops nulls, which columnar files add. Raises DataError for an unsupported key or value.
    """
    turn = {key: value for key, value in message.items() if value is not None}
    role = turn.get("role")
    turn["role"] = role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    for key, why in REFUSED.items():
        if turn.pop(key, None):
            raise DataError(f"{where}: the message has {key}, but {why}. Leave the row out")
    if turn.get("name") and role not in ("tool", None):
        raise DataError(
            f"{where} ({role}): name = {turn['name']!r:.80} would not reach the model. Move it into the text, or "
            "remove it"
        )
    if (content := turn.get("content")) is not None:
        turn["content"] = _one_text(content)
    _unify_reasoning(turn, where)
    _unify_weight(turn, where)
    if is_table(call := turn.pop("function_call", None)) and not turn.get("tool_calls"):
        turn["tool_calls"] = [{"type": "function", "function": dict(call)}]
    return turn


def _one_text(content: Any) -> Any:
    """Join content parts if all of them are text; return other content unchanged."""
    if not isinstance(content, list):
        return content
    parts = cast("list[Any]", content)
    texts = [part.get("text") for part in parts if is_table(part) and part.get("type") in PARTS_OF_TEXT]
    return "\n".join(map(str, texts)) if parts and len(texts) == len(parts) else parts


def _unify_reasoning(turn: dict[str, Any], where: str) -> None:
    texts = {key: value for key in REASONING if (value := turn.pop(key, None))}
    if not texts:
        return
    if wrong := [f"{key} is {value!r:.80}" for key, value in texts.items() if not isinstance(value, str)]:
        raise DataError(f"{where}: {wrong[0]}, not text")
    if len(set(texts.values())) > 1:
        raise DataError(f"{where}: {' and '.join(texts)} differ. Keep one of them")
    if turn["role"] != "assistant":
        raise DataError(f"{where} ({turn['role']}): only an assistant has {next(iter(texts))}")
    turn["reasoning_content"] = next(iter(texts.values()))


def _unify_weight(turn: dict[str, Any], where: str) -> None:
    values = {key: value for key in TRAINED if (value := turn.pop(key, None)) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key} = {value!r:.80}. A turn is trained on (1) or not (0)")
    weights = {int(value) for value in values.values()}
    if len(weights) > 1:
        raise DataError(f"{where}: {' and '.join(values)} contradict each other")
    if not weights:
        return
    if turn["role"] == "assistant":
        turn["weight"] = weights.pop()
    elif weights == {1}:
        raise DataError(f"{where} ({turn['role']}): {next(iter(values))} = 1, but only assistant turns are trained on")


def normalised_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Normalise all messages, and sort results into the order of their calls. Raises DataError."""
    return _in_order_of_calls([_normalised_message(turn, f"message {index}") for index, turn in enumerate(messages)])


def _in_order_of_calls(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort the results of parallel calls into the order of the calls, by call id.

    Results without ids keep their place. Raises DataError for a result with an unknown id or name,
    and for two results with the same id.
    """
    ordered = [dict(turn) for turn in turns]
    for position, turn in enumerate(ordered):
        if turn.get("role") != "assistant" or not isinstance(turn.get("tool_calls"), Sequence):
            continue
        calls = [call for call in turn["tool_calls"] if is_table(call)]
        ids = [call.get("id") for call in calls]
        end = position + 1
        while end < len(ordered) and ordered[end].get("role") == "tool":
            end += 1
        results = ordered[position + 1 : end]
        names = [function.get("name") for call in calls if is_table(function := call.get("function"))]
        if unknown := next((name for result in results if (name := result.get("name")) and name not in names), None):
            raise DataError(
                f"message {position}: a result has name {unknown!r:.80}, but the calls are of {names!r:.200}"
            )
        answered = [result.get("tool_call_id") for result in results]
        if None in answered or None in ids or not answered or len(set(ids)) < len(ids):
            continue
        if twice := next((call_id for call_id in answered if answered.count(call_id) > 1), None):
            raise DataError(f"message {position}: two results have tool_call_id {twice!r:.80}. Keep one of them")
        if unknown := next((call_id for call_id in answered if call_id not in ids), None):
            raise DataError(
                f"message {position}: a result has tool_call_id {unknown!r:.80}, but the calls have "
                f"{', '.join(map(repr, ids))[:200]}"
            )
        ordered[position + 1 : end] = sorted(results, key=lambda result: ids.index(result["tool_call_id"]))
    return ordered


def clean_messages(messages: Sequence[Message], fmt: ChatFormat) -> list[dict[str, Any]]:
    """Normalise messages (see ``normalised_messages``) and check their contents and order.

    Call arguments become mappings. Raises DataError, for example if an assistant or tool turn comes
    first.
    """
    clean = [_clean_message(message, index, fmt) for index, message in enumerate(normalised_messages(messages))]
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
        return f"the conversation starts with a turn of role {first!r} instead of a user turn"
    calls = results = 0
    for index, turn in enumerate(turns):
        if turn["role"] == "tool":
            results += 1
            if results > calls:
                return f"message {index} (tool): a result without a call before it"
            continue
        if results < calls:
            return f"message {index} ({turn['role']}): the {calls} calls before it have {results} results"
        calls, results = len(turn.get("tool_calls") or ()), 0
    return f"the last {calls} calls have {results} results" if 0 < results < calls else None


def with_call_ids(messages: Sequence[Message], call_ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Add an id to each call and its result, because some templates require ids.

    ``call_ids``: ids for the first calls of each turn. Other calls get a number from 0 in each
    turn, as nine letters and digits ("call00000"), which Mistral's templates require. Templates
    that do not render ids ignore them.
    """
    with_ids: list[dict[str, Any]] = []
    waiting: list[str] = []
    for original in messages:
        message = dict(original)
        if "tool_calls" in message:
            waiting = [*call_ids, *(f"call{number:05d}" for number in range(len(message["tool_calls"])))]
            calls = zip(message["tool_calls"], waiting, strict=False)
            message["tool_calls"] = [{**call, "id": call_id} for call, call_id in calls]
        elif message["role"] == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        with_ids.append(message)
    return with_ids


def _clean_message(message: Message, index: int, fmt: ChatFormat) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"message {index}: unknown role {role!r}. Choose one of: {', '.join(ROLES)}")
    called = message.get("tool_calls")
    if called is not None and not isinstance(called, Sequence):
        raise DataError(f"message {index} ({role}): tool_calls is {called!r:.80}, not a list")
    calls = cast("Sequence[Any] | None", called) or None
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
        clean["tool_calls"] = [normalised_call(call, f"message {index}, call {n}") for n, call in enumerate(calls)]
        for number, call in enumerate(clean["tool_calls"]):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            _refuse_specials(arguments, f"message {index}, call {number}", fmt)
    if "weight" in message:
        clean["weight"] = message["weight"]
    return clean


def normalised_call(call: Any, where: str) -> dict[str, Any]:
    """A call as {type, function: {name, arguments}}. Raises DataError.

    The arguments become a mapping without nulls; they may be JSON text.
    """
    function = call.get("function") if is_table(call) else None
    if not is_table(function) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call must be {{function: {{name, arguments}}}}, not {call!r:.200}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: arguments are not JSON: {error}") from error
    if not is_table(arguments):
        raise DataError(f"{where}: arguments are {type(arguments).__name__}, not a mapping")
    arguments = {key: value for key, value in arguments.items() if value is not None}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse_specials(text: str, where: str, fmt: ChatFormat) -> None:
    normal = fmt.normalised(text)
    forged = next((token for token in fmt.specials if token in text or fmt.normalised(token) in normal), None)
    if forged is not None:
        raise DataError(f"{where}: the text contains the control token {forged}, which would end or forge a turn")


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
