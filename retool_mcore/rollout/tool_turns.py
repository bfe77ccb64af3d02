"""Protocols that render calls and results with the chat template, in the model's native format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from retool_mcore.data import chat
from retool_mcore.data.chat import name_of
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_INTERPRETER
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.rollout.native_calls import mistral_ids, parse_llama3, parse_mistral, parse_qwen3_coder
from retool_mcore.rollout.tool_call import Parsed, parse_hermes, without_interpreter
from retool_mcore.rollout.tool_protocol import Message, ToolProtocol
from retool_mcore.rollout.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ToolTurns(ToolProtocol):
    """Renders calls, results and tool schemas with the chat template. Subclasses parse the calls.

    ``tags``: the opening and closing tag of a call, or None. With tags, a turn ends at its first
    call, on the token that completes the closing tag. After ``allow_parallel_calls``, only an
    end-of-turn token ends it, and its calls run concurrently. The same holds for a format without
    tags. Raises CheckpointError if the template renders calls in another format.
    """

    tags: tuple[str, str] | None = None
    form: str  # the format, for error messages

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        turn = chat.probe_call(tokenizer)
        read = self.calls(turn)
        if [code.strip() for code in read.codes] != ["print(1)"] or (self.tags and not turn.endswith(self.tags[1])):
            raise CheckpointError(
                f'rollout.protocol = "{self.name}" reads calls of the form {self.form}, and the chat template of '
                f"{name_of(tokenizer)!r} renders one as {turn!r}. "
                'Use the protocol of that form, or rollout.protocol = "retool"'
            )
        if self.tags:
            self._stop_at(self.tags[1])

    @abstractmethod
    def calls(self, text: str) -> Parsed:
        """Parse a turn's text."""

    def offer(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)

    def allow_parallel_calls(self) -> None:
        self.stop_token_ids, self.call_end = self.end_ids, None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        schemas = [*([CODE_INTERPRETER] if self.interpreter else ()), *(tool.schema for tool in self.tools)]
        return chat.render_prompt(messages, schemas, self.tokenizer)

    def ended(self, turn_ids: Sequence[int]) -> bool:
        return self.tags is None or self._tag_ended(turn_ids, *self.tags)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        parsed = self.calls(text)
        return parsed if self.interpreter else without_interpreter(parsed, self.tools)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        ids = chat.tool_turn_ids(self.tokenizer, results, self.call_ids(turn_ids))
        # If the model sampled the end-of-turn token, do not repeat it.
        return ids[1:] if turn_ids[-1] == self.format.end_of_turn_id else ids

    def call_ids(self, turn_ids: Sequence[int]) -> Sequence[str]:
        """The call ids that the model sampled, if its format has ids."""
        return ()


class Hermes(ToolTurns):
    """Qwen2.5's format. Results are tool messages."""

    name = "hermes"
    tags = (CALL_START, CALL_END)
    form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'

    def calls(self, text: str) -> Parsed:
        return parse_hermes(text, self.tools)


class Qwen3Coder(ToolTurns):
    """The XML format of Qwen3-Coder and Qwen3.5, inside Hermes' tags."""

    name = "qwen3_coder"
    tags = (CALL_START, CALL_END)
    form = "<tool_call><function=...><parameter=...>...</parameter></function></tool_call>"

    def calls(self, text: str) -> Parsed:
        return parse_qwen3_coder(text, self.tools)


class Llama3(ToolTurns):
    """The JSON format of Llama 3.1, 3.2 and 3.3.

    A call is JSON, with or without <|python_tag|> before it, or code after that tag. It is the
    whole turn. The model may end it with <|eom_id|> or <|eot_id|>.
    """

    name = "llama3"
    form = '{"name": ..., "parameters": {...}}'

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        more = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if str(token) == "<|eom_id|>"}
        self.end_ids = self.stop_token_ids = tuple(sorted({*self.end_ids, *more}))
        self._closing = {self.format.end_of_turn_id, *more}

    def allow_parallel_calls(self) -> None:
        raise ConfigError(
            'rollout.calls_per_turn = "all": the templates of Llama 3 write one call in a turn. Use "first".'
        )

    def calls(self, text: str) -> Parsed:
        return parse_llama3(text, self.tools)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        ids = chat.tool_turn_ids(self.tokenizer, results)
        return ids[1:] if turn_ids[-1] in self._closing else ids


class Mistral(ToolTurns):
    """Mistral's format: [TOOL_CALLS] followed by a list of calls or by name[ARGS]{...}."""

    name = "mistral"
    form = '[TOOL_CALLS] [{"name": ..., "arguments": {...}}] or [TOOL_CALLS]name[ARGS]{...}'

    def calls(self, text: str) -> Parsed:
        return parse_mistral(text, self.tools)

    def call_ids(self, turn_ids: Sequence[int]) -> Sequence[str]:
        return mistral_ids(self.text(turn_ids))
