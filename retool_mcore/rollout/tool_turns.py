"""Protocols whose calls and results are turns of the chat template, each in a model's own form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from retool_mcore.data import chat
from retool_mcore.data.tokenizer import name_of
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_INTERPRETER
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.rollout.native_calls import mistral_ids, parse_llama3, parse_mistral, parse_qwen3_coder
from retool_mcore.rollout.tool_call import Parsed, parse_hermes, without_interpreter
from retool_mcore.rollout.tool_protocol import Message, ToolProtocol
from retool_mcore.rollout.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ToolTurns(ToolProtocol):
    """The template writes calls, results and the tools' schemas; a subclass reads the calls.

    ``tags`` open and close a call. A turn ends at its first call, on the last token of the closing
    tag, also where the tokenizer splits it; after ``allow_parallel_calls`` at the turn's end, and
    the calls of the turn run side by side. Without tags the turn's end completes its calls, and all
    of them run. Raises CheckpointError when the template writes calls in another form.
    """

    tags: tuple[str, str] | None = None
    form: str  # for people

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
        """Read a turn's text."""

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
        # A turn that the model closed itself already holds the template's first token.
        return ids[1:] if turn_ids[-1] == self.format.end_of_turn_id else ids

    def call_ids(self, turn_ids: Sequence[int]) -> Sequence[str]:
        """The ids that the model gave its calls, where its form has any."""
        return ()


class Hermes(ToolTurns):
    """Qwen2.5's form; the result comes back as a tool message."""

    name = "hermes"
    tags = (CALL_START, CALL_END)
    form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'

    def calls(self, text: str) -> Parsed:
        return parse_hermes(text, self.tools)


class Qwen3Coder(ToolTurns):
    """The XML of Qwen3-Coder and Qwen3.5, in the tags of hermes."""

    name = "qwen3_coder"
    tags = (CALL_START, CALL_END)
    form = "<tool_call><function=...><parameter=...>...</parameter></function></tool_call>"

    def calls(self, text: str) -> Parsed:
        return parse_qwen3_coder(text, self.tools)


class Llama3(ToolTurns):
    """JSON of Llama 3.1, 3.2 and 3.3, with or without <|python_tag|>; or code after that tag.

    A call is the whole turn. The model may close it by <|eom_id|> as well as by <|eot_id|>.
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
    """[TOOL_CALLS] with a list of calls, or with name[ARGS]{...}, by Mistral's templates."""

    name = "mistral"
    form = '[TOOL_CALLS] [{"name": ..., "arguments": {...}}] or [TOOL_CALLS]name[ARGS]{...}'

    def calls(self, text: str) -> Parsed:
        return parse_mistral(text, self.tools)

    def call_ids(self, turn_ids: Sequence[int]) -> Sequence[str]:
        return mistral_ids(self.text(turn_ids))
