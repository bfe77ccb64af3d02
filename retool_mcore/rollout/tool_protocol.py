"""What a tool protocol is, and the one without a tool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retool_mcore.data import chat
from retool_mcore.data.tokenizer import decode, encode_piece, name_of
from retool_mcore.data.tool import closes
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.platforms.call_end import CallEnd
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.tool_call import Parsed, without_call
from retool_mcore.rollout.tool_output import cut_middle
from retool_mcore.rollout.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


class ToolProtocol(ABC):
    """How the model and its tools talk. Holds the tokenizer, but no state of a trajectory.

    ``tools`` are those beside the interpreter, which may be called if ``interpreter``. ``end_ids``
    are the tokens that close a model turn. ``stop_token_ids`` are these and the tokens that
    complete a call: the engine ends a turn at the first of them that it samples, and returns it as
    the turn's last token. ``call_end``, if not None, tells which of them complete no call; an
    engine that knows it goes on there.
    """

    name: str
    end_ids: tuple[int, ...]
    tools: tuple[Tool, ...] = ()
    interpreter = True
    stop_token_ids: tuple[int, ...]
    call_end: CallEnd | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.format = chat.chat_format(tokenizer)
        # Qwen's generation config ends a turn on <|im_end|> and on <|endoftext|>, its padding
        # token.
        ends = (self.format.end_of_turn_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self.end_ids = tuple(sorted({token_id for token_id in ends if isinstance(token_id, int)}))
        self.stop_token_ids = self.end_ids
        self._decoded: tuple[Sequence[int], str] = ((), "")  # what was decoded last

    @abstractmethod
    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids [T] of the prompt, up to and including the first model turn's header."""

    @abstractmethod
    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        """Read a complete model turn. ``turn_ids`` end with the token that stopped the engine."""

    @abstractmethod
    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """Tokens [T] written after a model turn: the results, and the header of the next turn.

        They include the token that closes the model turn where the model has not sampled it.
        """

    def offer(self, tools: Sequence[Tool]) -> None:
        """Offer tools beside the interpreter. Raises ConfigError if the protocol cannot."""
        if tools:
            raise ConfigError(
                f'rollout.tools or rollout.mcp offers {tools[0].name!r}, and calls of rollout.protocol = "{self.name}" '
                'have no name: all are of the interpreter. Use protocol "hermes".'
            )

    def allow_parallel_calls(self) -> None:
        """Allow several calls in one turn. Raises ConfigError if the protocol cannot."""
        raise ConfigError(
            f'rollout.calls_per_turn = "all": a turn of rollout.protocol = "{self.name}" is cut at its first call. '
            'Use "first", or protocol "hermes".'
        )

    def shown(self, output: str, max_tokens: int) -> tuple[str, int]:
        """The part of an interpreter's output that the model sees, and the number of tokens cut.

        Markup in the output is broken up.
        """
        return cut_middle(self.clean(output), max_tokens, self.tokenizer)

    def clean(self, output: str) -> str:
        """``output`` with everything broken up that could pass for a turn, a call or a result."""
        return chat.neutralise(output, self.format)

    def ended(self, turn_ids: Sequence[int]) -> bool:
        """Is the turn over, now that the engine has stopped?

        False where its last token only looked like the end of a call.
        """
        return True

    def _stop_at(self, tag: str) -> None:
        """Let the engine stop where the model completes ``tag``, of one token or several."""
        ids = encode_piece(self.tokenizer, tag)
        if len(ids) == 1:
            self.stop_token_ids = tuple(sorted({*self.end_ids, ids[0]}))
            return
        call_end = CallEnd.of(self.tokenizer.get_vocab(), tag)
        if ids[-1] not in call_end.completing:
            raise CheckpointError(
                f'rollout.protocol = "{self.name}" stops the engine on the tokens that complete {tag}, and the '
                f"vocabulary of {name_of(self.tokenizer)!r} does not spell them out. Use a byte-level tokenizer "
                "(Qwen2.5, Qwen3, Llama 3)"
            )
        self.stop_token_ids = tuple(sorted({*self.end_ids, *call_end.completing}))
        self.call_end = call_end

    def _tag_ended(self, turn_ids: Sequence[int], start: str, end: str) -> bool:
        """Whether the turn is closed, or its last token completes a tag that ends a call."""
        if turn_ids[-1] in self.end_ids:
            return True
        if self.call_end is not None and not self.call_end.complete(turn_ids):
            return False
        return closes(self.text(turn_ids), start, end)

    def answer(self, text: str) -> str | None:
        """The answer in a turn that was cut off before it could be read as a whole."""
        return last_answer(text)

    def text(self, turn_ids: Sequence[int]) -> str:
        """The turn as text, without the control token that closed it; tool tags stay.

        The loop asks of the same turn whether it has ended and what it says.
        """
        if turn_ids != self._decoded[0]:
            closed = bool(turn_ids) and turn_ids[-1] in self.end_ids
            text = decode(self.tokenizer, turn_ids[: len(turn_ids) - closed], clean_up=False)
            self._decoded = (list(turn_ids), text)
        return self._decoded[1]


class TextOnly(ToolProtocol):
    """No interpreter: the baseline of the paper's comparison.

    One turn is the whole response, and tags mean nothing.
    """

    name = "text"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(messages, None, self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return without_call(text)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        raise AssertionError("a text-only trajectory has no results to write")
