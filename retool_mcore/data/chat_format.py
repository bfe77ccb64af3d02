"""What a chat template puts between turns, found by rendering probes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from retool_mcore.data.tokenizer import apply_template, decode, encode, encode_piece, name_of
from retool_mcore.data.tool import CALL_END, CALL_START
from retool_mcore.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Markup that structures a hermes conversation whether or not the tokenizer has tokens for it.
HERMES_MARKUP = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
PROBE = "retool-probe"
_SHOWN = 60  # characters of a difference


@dataclass(frozen=True)
class ChatFormat:
    """What the template puts between turns; see ``chat_format``."""

    end_of_turn: str  # "<|im_end|>": ends in one token, before which the template may put blanks
    end_of_turn_id: int
    after: str  # what the template writes then: a line break of ChatML
    added: bool  # the template ends a turn by no token, so training and sampling put eos_token there
    opened: str  # what only a prompt has after the header of the turn to sample: "<think>\n" of R1
    specials: tuple[str, ...]  # tokens that no message may contain
    markup: re.Pattern[str]  # markup that a tool's output must not be able to forge
    # A text as the tokenizer looks for added tokens in it: some fold case or full-width letters.
    normalised: Callable[[str], str] = str


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """The token that ends the model's turns, and its id. Raises CheckpointError."""
    fmt = chat_format(tokenizer)
    return fmt.end_of_turn.strip(), fmt.end_of_turn_id


@lru_cache(maxsize=8)
def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Find how the template ends a turn and opens one. Cached per tokenizer.

    A turn that the template closes by no token is closed by the tokenizer's eos_token. Raises
    CheckpointError when there is none either, or when the prompt of a turn is no beginning of the
    conversation with it, with the shortest example. Tool turns are asked of it by
    ``chat.require_tool_turns``, where they are rendered.
    """
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token).strip()) > 1]
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}
    try:
        prompt = rendered(tokenizer, [question], None, add_generation_prompt=True)
        text = rendered(tokenizer, [question, answer], None, add_generation_prompt=False)
    except DataError as error:
        raise CheckpointError(f"{error}. It was asked for one user turn and its answer") from error
    if PROBE not in text:
        raise CheckpointError(f"the chat template renders an assistant turn as {text!r}, without what it says")
    after = text[text.index(PROBE) + len(PROBE) :]
    opened = _opened(prompt, text)
    _require_exact(tokenizer, prompt, text)
    blank = after[: len(after) - len(after.lstrip())]
    first_id = encode_piece(tokenizer, after[len(blank) :])[:1]
    end_token = decode(tokenizer, first_id)
    added_end = not end_token.strip() or end_token not in added or not after.startswith(blank + end_token)
    if added_end:
        blank, end_token = "", _eos_of(tokenizer, after)
        first_id = encode_piece(tokenizer, end_token)
    normalised = _normaliser(tokenizer)
    marks = {*added, *map(normalised, added), *HERMES_MARKUP} - {""}
    _require_same_end(tokenizer, "" if added_end else blank + end_token)
    return ChatFormat(
        end_of_turn=blank + end_token,
        end_of_turn_id=first_id[0],
        after=after if added_end else after[len(blank + end_token) :],
        added=added_end,
        opened=opened,
        specials=tuple(dict.fromkeys((*tokenizer.all_special_tokens, *specials, end_token))),
        markup=re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len)[::-1])),
        normalised=normalised,
    )


def _eos_of(tokenizer: PreTrainedTokenizerBase, after: str) -> str:
    token = tokenizer.eos_token
    if not isinstance(token, str) or len(encode_piece(tokenizer, token)) != 1:
        raise CheckpointError(
            f"the chat template closes an assistant turn by {after!r}, which does not start with a control token, and "
            f"the tokenizer of {name_of(tokenizer)!r} has no eos_token of one token: a rollout could not see the end"
        )
    return token


def _normaliser(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added: Any = tokenizer.added_tokens_decoder.values()
    folds = any(bool(token.normalized) for token in added)
    normaliser: Any = getattr(backend, "normalizer", None) if folds else None
    return normaliser.normalize_str if normaliser is not None else str


def _require_same_end(tokenizer: PreTrainedTokenizerBase, end: str) -> None:
    """Raise CheckpointError where an earlier assistant turn ends otherwise than the last one.

    Where the next occurrence of the last turn's end was taken, training would learn the user's text
    between them. ``end``: "" for a template that writes none.
    """
    turns = [("user", "x"), ("assistant", PROBE), ("user", "y"), ("assistant", "z")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = rendered(tokenizer, messages, None, add_generation_prompt=False)
    except DataError:
        return  # a template for one turn; conversations of more are refused where they are rendered
    after = text[text.index(PROBE) + len(PROBE) :] if PROBE in text else end
    if not after.startswith(end):
        raise CheckpointError(
            f"the chat template of {name_of(tokenizer)!r} ends the last assistant turn by {end!r} and an earlier one "
            f"by {after[: len(end) + 20]!r}, so a rollout could not tell where a turn ends. The shortest example is "
            'two user turns, each with an answer. Set model.chat_template ("chatml" is one)'
        )


def _opened(prompt: str, text: str) -> str:
    """What the prompt has beyond the header of a turn.

    Raises CheckpointError where it is no beginning of the conversation for another reason.
    """
    if text.startswith(prompt):
        return ""
    header = prompt[: _common(prompt, text)]
    opened, instead = prompt[len(header) :], text[len(header) :]
    if opened.startswith("<think>") and instead.lstrip().startswith(PROBE):
        return opened
    raise CheckpointError(
        "the chat template is not stable: a prompt is no beginning of the conversation with its answer, so training "
        f'would not see what sampling saw. The shortest example is a user turn "x" and its answer "{PROBE}": after '
        f"{header[-_SHOWN:]!r} the prompt goes on with {opened[:_SHOWN]!r}, and the conversation with "
        f"{instead[:_SHOWN]!r}. Set model.template_args if an argument of the template decides it, or "
        "model.chat_template"
    )


def _require_exact(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> None:
    """Tokens that are put together from a prompt and a turn spell what the template renders."""
    cut = _common(prompt, text)
    ids = [*encode(tokenizer, text[:cut]), *encode_piece(tokenizer, text[cut:])]
    spelt = decode(tokenizer, ids, clean_up=False)
    if spelt.removeprefix(" ") != text.removeprefix(" "):
        at = _common(spelt, text)
        raise CheckpointError(
            f"the tokenizer of {name_of(tokenizer)!r} does not spell what the chat template renders, put together "
            f"by turns: it has {spelt[at : at + _SHOWN]!r} for {text[at : at + _SHOWN]!r}. Use a byte-level tokenizer"
        )


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """A conversation as the template writes it. Raises DataError when the template refuses it."""
    from jinja2 import TemplateError

    try:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
