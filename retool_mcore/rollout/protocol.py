"""Tool protocols: how a prompt is rendered, where the engine stops, how a turn is read, how a
result is written back.

One small class each; the loop knows none of them. A further protocol subclasses ``Protocol`` and is
registered in ``PROTOCOLS``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from retool_mcore.config import Rollout
from retool_mcore.data import chat
from retool_mcore.data.prompts import QUESTION_MARK, plain_problem, retool_prompt
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_INTERPRETER
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.tool_call import (
    CallReader,
    Parsed,
    parse_hermes,
    parse_retool,
)
from retool_mcore.rollout.tool_output import cut_middle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

RETOOL_MARKUP = re.compile(r"</?(?:code|interpreter|answer)>")


class Protocol(ABC):
    """How one model and one interpreter talk. Holds the tokenizer; keeps no state of a trajectory.

    ``end_ids`` close a turn of the model, ``stop_token_ids`` are those and the tokens that complete
    a call: the engine ends a turn on the first of them it samples, and returns it as the last
    token.
    """

    name: str
    end_ids: tuple[int, ...]
    first_reader: CallReader | None = None
    stop_token_ids: tuple[int, ...]

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.format = chat.chat_format(tokenizer)
        # # Qwen's generation config ends a turn on <|im_end|> and on <|endoftext|>, which is its
        # padding token.
        ends = (self.format.end_of_turn_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self.end_ids = tuple(sorted({token_id for token_id in ends if isinstance(token_id, int)}))
        self.stop_token_ids = self.end_ids

    @abstractmethod
    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids [T] of the prompt, up to and including the header of the first model turn."""

    @abstractmethod
    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        """What a complete model turn says. ``turn_ids`` end with the token that stopped the engine."""

    @abstractmethod
    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """Tokens [T] from the end of a model turn, through the interpreter's results, to the next
        turn's header.
        """

    def let_all_calls(self) -> None:
        """Let a turn hold several calls. Raises ConfigError where the form has none such."""
        raise ConfigError(
            f'rollout.calls_per_turn = "all": a turn of rollout.protocol = "{self.name}" is cut at its first call. '
            'Use "first", or protocol "hermes".'
        )

    def shown(self, output: str, max_tokens: int) -> tuple[str, int]:
        """What of an interpreter's output the model is shown, markup broken up, and the number of
        tokens cut of it.
        """
        return cut_middle(self.clean(output), max_tokens, self.tokenizer)

    def clean(self, output: str) -> str:
        """``output`` with everything broken up that could pass for a turn, a call or a result."""
        return chat.neutralise(output, self.format)

    def ended(self, turn_ids: Sequence[int]) -> bool:
        """Is the turn over, now that the engine has stopped? False where its last token only looked
        like the end.
        """
        return True

    def answer(self, text: str) -> str | None:
        """The answer in a turn that was cut off before it could be read as a whole."""
        return last_answer(text)

    def text(self, turn_ids: Sequence[int]) -> str:
        """The turn as text, without the control token that closed it; tool tags stay."""
        closed = bool(turn_ids) and turn_ids[-1] in self.end_ids
        text = self.tokenizer.decode(
            list(turn_ids[: len(turn_ids) - closed]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence decodes to one string"
        return text


class TextOnly(Protocol):
    """No interpreter: the baseline of the paper's comparison. A turn is the whole response, tags
    mean nothing.
    """

    name = "text"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(messages, None, self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        answer = last_answer(text)
        return Parsed(kind="text") if answer is None else Parsed(kind="answer", answer=answer)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        raise AssertionError("a text-only trajectory has no results to write")


class Hermes(Protocol):
    """Qwen2.5's form: <tool_call>JSON</tool_call>, the result comes back as a tool message.

    The first call of a turn closes it, on its last token; after ``let_all_calls`` the model goes on
    to <|im_end|>, and the calls of the turn run side by side. Raises CheckpointError when the
    tokenizer has no single token for </tool_call>: the engine could not stop on it.
    """

    name = "hermes"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        ids = tokenizer.encode(CALL_END, add_special_tokens=False)
        if len(ids) != 1:
            raise CheckpointError(
                f'rollout.protocol = "hermes" needs {CALL_START} and {CALL_END} as single tokens, but the tokenizer of '
                f"{tokenizer.name_or_path!r} splits {CALL_END} into {len(ids)}. Use a Qwen2.5 or Qwen3 tokenizer, or "
                "add the two tokens before SFT"
            )
        self.stop_token_ids = tuple(sorted({*self.end_ids, ids[0]}))

    def let_all_calls(self) -> None:
        self.stop_token_ids = self.end_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(messages, [CODE_INTERPRETER], self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return parse_hermes(text, self.first_reader)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        ids = chat.tool_turn_ids(self.tokenizer, results)
        # A turn that the model closed itself already holds the template's first token.
        return ids[1:] if turn_ids[-1] == self.format.end_of_turn_id else ids


class Retool(Protocol):
    """The paper's form, all in one assistant message: <code>...</code>
    <interpreter>...</interpreter> ... <answer>.

    </code> is several tokens, and the last may hold what follows (">\\n"). The engine stops on
    every token that can complete the tag, few in the vocabulary and rare in text; where it did not
    complete one, the turn just goes on. Results are written as tokens of their own, never merged
    with the model's, and SFT must cut its text in the same places: after </code> and after
    </interpreter> and its line break.
    """

    name = "retool"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        completing = completing_ids(tokenizer, CODE_END)
        if tokenizer.encode(CODE_END, add_special_tokens=False)[-1] not in completing:
            raise CheckpointError(
                f'rollout.protocol = "retool" stops the engine on the tokens that complete {CODE_END}, and the '
                f"vocabulary of {tokenizer.name_or_path!r} does not spell them out. Use a byte-level tokenizer "
                "(Qwen2.5, Qwen3, Llama 3)"
            )
        self.stop_token_ids = tuple(sorted({*self.end_ids, *completing}))
        self._completing = frozenset(completing)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        last = dict(messages[-1])
        if QUESTION_MARK not in last["content"]:  # a row of ReTool's own data has its instruction
            last["content"] = retool_prompt(plain_problem(last["content"]))
        return chat.render_prompt([*messages[:-1], last], None, self.tokenizer)

    def clean(self, output: str) -> str:
        return RETOOL_MARKUP.sub(lambda match: f"{match[0][0]} {match[0][1:]}", super().clean(output))

    def ended(self, turn_ids: Sequence[int]) -> bool:
        if turn_ids[-1] not in self._completing:
            return True
        tail = self.tokenizer.decode(list(turn_ids[-len(CODE_END) :]), skip_special_tokens=False)
        return CODE_END in tail

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        if turn_ids[-1] in self.end_ids:  # the model closed its answer; nothing can be written after it
            answer = last_answer(text)
            return Parsed(kind="text") if answer is None else Parsed(kind="answer", answer=answer)
        return parse_retool(text)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        (result,) = results
        after = self.text(turn_ids).rpartition(CODE_END)[2]
        start = "" if after.endswith("\n") else "\n"
        written = f"{start}<interpreter>\n{self.clean(result)}\n</interpreter>\n"
        return self.tokenizer.encode(written, add_special_tokens=False)


def completing_ids(tokenizer: PreTrainedTokenizerBase, tag: str) -> set[int]:
    """Every token that can be the one with which ``tag`` becomes part of the text, whatever came
    before it.

    Such a token holds the whole tag, or starts with an end piece of it. Tags are ASCII, which
    byte-level tokenizers keep as it is in the names of their tokens.
    """
    ends = tuple(tag[cut:] for cut in range(1, len(tag)))
    names = ((token_id, name) for name, token_id in tokenizer.get_vocab().items())
    return {token_id for token_id, name in names if tag in name or name.startswith(ends)}


def checked_prompt(protocol: Protocol, messages: Sequence[Message], max_prompt_tokens: int, where: str) -> list[int]:
    """Token ids [T] of a prompt. Raises DataError when it has more than data.max_prompt_tokens;
    none is cut.
    """
    ids = protocol.prompt_ids(messages)
    if len(ids) > max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {max_prompt_tokens}. Raise "
            f"it, or leave the row out: {str(messages[-1].get('content'))[:200]!r}"
        )
    return ids


PROTOCOLS: dict[str, type[Protocol]] = {protocol.name: protocol for protocol in (Hermes, Retool)}


def open_protocol(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tool: bool = True,
    calls: Literal["first", "all"] = "first",
    first_reader: CallReader | None = None,
) -> Protocol:
    """A protocol by its name. ``first_reader``: the engine's own reader of hermes calls, asked
    before ours.

    ``calls``: a turn is cut at its first call, or may hold several, which run side by side. Raises
    ConfigError for an unknown name, CheckpointError for an unfit tokenizer.
    """
    if name not in PROTOCOLS:
        raise ConfigError(f"rollout.protocol = {name!r} is none of {', '.join(PROTOCOLS)}.")
    if not tool:
        return TextOnly(tokenizer)
    protocol = PROTOCOLS[name](tokenizer)
    if calls == "all":
        protocol.let_all_calls()
    protocol.first_reader = first_reader
    return protocol


def protocol_of(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, *, first_reader: CallReader | None = None
) -> Protocol:
    """The protocol that a run's [rollout] section asks for; see ``open_protocol``."""
    return open_protocol(
        rollout.protocol,
        tokenizer,
        tool=rollout.tool,
        calls=rollout.calls_per_turn,
        first_reader=first_reader,
    )
