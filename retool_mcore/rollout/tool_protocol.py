"""The base class of tool protocols, and the text-only protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retool_mcore.data import chat
from retool_mcore.data.chat import decode, encode_piece, name_of
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
    """Renders prompts and tool results and parses model turns, for one tool-call format.

    A protocol has a tokenizer but no per-trajectory state.

    ``interpreter``: whether the model may call the code interpreter.
    ``tools``: callable tools other than the interpreter.
    ``end_ids``: tokens that end a model turn (EOS, <|im_end|>).
    ``stop_token_ids``: ``end_ids`` plus the tokens that complete a call. The engine stops at the
    first of them that it samples and returns it as the turn's last token.
    ``call_end``: if set, decides whether a stop token really completes a call. An engine that
    supports it continues if not.
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
        # Qwen's generation config stops at <|im_end|> and at <|endoftext|>, its padding token.
        ends = (self.format.end_of_turn_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self.end_ids = tuple(sorted({token_id for token_id in ends if isinstance(token_id, int)}))
        self.stop_token_ids = self.end_ids
        self._decoded: tuple[Sequence[int], str] = ((), "")  # one-entry cache of ``text``

    @abstractmethod
    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids [T] of the prompt, including the header of the first model turn."""

    @abstractmethod
    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        """Parse a complete model turn. ``turn_ids`` end with the token that stopped the engine."""

    @abstractmethod
    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        """Token ids [T] to append after a model turn: the results and the next turn's header.

        They start with the end-of-turn token if the model did not sample it.
        """

    def offer(self, tools: Sequence[Tool]) -> None:
        """Offer ``tools`` to the model. Raises ConfigError if the protocol does not support it."""
        if tools:
            raise ConfigError(
                f'rollout.tools or rollout.mcp offers {tools[0].name!r}, and calls of rollout.protocol = "{self.name}" '
                'have no name: all are of the interpreter. Use protocol "hermes".'
            )

    def allow_parallel_calls(self) -> None:
        """Allow several calls per turn. Raises ConfigError if the protocol does not support it."""
        raise ConfigError(
            f'rollout.calls_per_turn = "all": a turn of rollout.protocol = "{self.name}" is cut at its first call. '
            'Use "first", or protocol "hermes".'
        )

    def shown(self, output: str, max_tokens: int) -> tuple[str, int]:
        """A tool's output as the model sees it, and the number of tokens cut from its middle.

        Markup in the output is broken up, see ``clean``.
        """
        return cut_middle(self.clean(output), max_tokens, self.tokenizer)

    def clean(self, output: str) -> str:
        """Break up markup in ``output`` that could be mistaken for a turn, a call or a result."""
        return chat.neutralise(output, self.format)

    def ended(self, turn_ids: Sequence[int]) -> bool:
        """Whether the turn is complete after the engine stopped at a stop token.

        False if the last token only looked like the end of a call.
        """
        return True

    def _stop_at(self, tag: str) -> None:
        """Make the engine stop when the model completes ``tag``, which may span several tokens."""
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
        """Whether the last token ends the turn, or completes the closing tag of a call."""
        if turn_ids[-1] in self.end_ids:
            return True
        if self.call_end is not None and not self.call_end.complete(turn_ids):
            return False
        return closes(self.text(turn_ids), start, end)

    def answer(self, text: str) -> str | None:
        """The boxed answer in a turn that the token budget cut off, or None."""
        return last_answer(text)

    def text(self, turn_ids: Sequence[int]) -> str:
        """Decode a turn without its end-of-turn token; tool tags stay.

        Caches the last turn, because the loop calls both ``ended`` and ``read`` with it.
        """
        if turn_ids != self._decoded[0]:
            closed = bool(turn_ids) and turn_ids[-1] in self.end_ids
            text = decode(self.tokenizer, turn_ids[: len(turn_ids) - closed], clean_up=False)
            self._decoded = (list(turn_ids), text)
        return self._decoded[1]


class TextOnly(ToolProtocol):
    """No tools: the text-only baseline of the paper.

    The response is a single turn, and tool tags have no meaning.
    """

    name = "text"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(messages, None, self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return without_call(text)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        raise AssertionError("a text-only trajectory has no results to write")
