"""Tool protocols render prompts, define stop tokens, parse model turns and render tool results.

``PROTOCOLS`` lists the built-in ones. ``rollout.protocol = "module:Name"`` selects a user-defined
subclass of ``ToolProtocol``. The loop only uses the base class.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from retool_mcore.config import ToolLoop
from retool_mcore.config.imports import import_object
from retool_mcore.data import chat
from retool_mcore.data.chat import decode, encode_piece, name_of
from retool_mcore.data.prompt_format import retool_messages
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_INTERPRETER, CODE_START, TOOL_NAME, closes
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.platforms.call_end import CallEnd
from retool_mcore.rollout.mcp import mcp_tools
from retool_mcore.rollout.tool_call import (
    Parsed,
    mistral_ids,
    parse_hermes,
    parse_llama3,
    parse_mistral,
    parse_qwen3_coder,
    parse_retool,
    parse_text_turn,
    without_interpreter,
)
from retool_mcore.rollout.tool_output import cut_middle
from retool_mcore.rollout.tools import Tool, open_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
RETOOL_MARKUP = re.compile(r"</?(?:code|interpreter|answer)>")


class ToolProtocol(ABC):
    """Renders prompts and tool results and parses model turns, for one tool-call format.

    A protocol has a tokenizer but no per-trajectory state.

    ``interpreter``: whether the model may call the code interpreter.
    ``tools``: callable tools other than the interpreter.
    ``end_ids``: tokens that end a model turn (EOS, <|im_end|>).
    ``stop_token_ids``: ``end_ids`` plus the tokens that complete a call. The engine stops at the
    first of them that it samples and returns it as the turn's last token.
    ``call_end``: if set, decides whether a stop token completes a call. After a token that does
    not, an engine that supports ``call_end`` keeps sampling.
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
        """Offer ``tools`` to the model. Raises ConfigError if the protocol cannot."""
        if tools:
            raise ConfigError(
                f'rollout.tools or rollout.mcp offers {tools[0].name!r}, but rollout.protocol = "{self.name}" '
                'supports only the interpreter, because its calls have no tool name. Use protocol "hermes".'
            )

    def allow_parallel_calls(self) -> None:
        """Allow several calls per turn. Raises ConfigError if the protocol does not support it."""
        raise ConfigError(
            f'rollout.calls_per_turn = "all": rollout.protocol = "{self.name}" allows only one call per turn. '
            'Use "first", or protocol "hermes".'
        )

    def render_output(self, output: str, max_tokens: int) -> tuple[str, int]:
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
                f'rollout.protocol = "{self.name}" stops the engine on the tokens that complete {tag}, but the '
                f"vocabulary of {name_of(self.tokenizer)!r} does not contain their text. Use a byte-level tokenizer "
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
        return parse_text_turn(text)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        raise AssertionError("a text-only trajectory has no results")


class ToolTurns(ToolProtocol):
    """Renders calls, results and tool schemas with the chat template. Subclasses parse the calls.

    ``tags``: the opening and closing tag of a call, or None. With tags, a turn ends at its first
    call, on the token that completes the closing tag. After ``allow_parallel_calls``, and in
    a format without tags, only an end-of-turn token ends it, and its calls run concurrently.
    ``closing_ids``: tokens with which the model ends a turn before a result. Raises
    CheckpointError if the template renders calls in another format.
    """

    tags: tuple[str, str] | None = None
    form: str  # the format, for error messages

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        turn = chat.require_tool_turns(tokenizer)
        read = self.calls(turn)
        if [code.strip() for code in read.codes] != ["print(1)"] or (self.tags and not turn.endswith(self.tags[1])):
            raise CheckpointError(
                f'rollout.protocol = "{self.name}" reads calls of the form {self.form}, but the chat template of '
                f"{name_of(tokenizer)!r} renders one as {turn!r}. "
                'Use the protocol of that form, or rollout.protocol = "retool"'
            )
        self.closing_ids = {self.format.end_of_turn_id}
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
        return ids[1:] if turn_ids[-1] in self.closing_ids else ids

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
        eom = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if str(token) == "<|eom_id|>"}
        self.end_ids = self.stop_token_ids = tuple(sorted({*self.end_ids, *eom}))
        self.closing_ids |= eom

    def allow_parallel_calls(self) -> None:
        raise ConfigError(
            'rollout.calls_per_turn = "all": the templates of Llama 3 allow one call per turn. Use "first".'
        )

    def calls(self, text: str) -> Parsed:
        return parse_llama3(text, self.tools)


class Mistral(ToolTurns):
    """Mistral's format: [TOOL_CALLS] followed by a list of calls or by name[ARGS]{...}."""

    name = "mistral"
    form = '[TOOL_CALLS] [{"name": ..., "arguments": {...}}] or [TOOL_CALLS]name[ARGS]{...}'

    def calls(self, text: str) -> Parsed:
        return parse_mistral(text, self.tools)

    def call_ids(self, turn_ids: Sequence[int]) -> Sequence[str]:
        return mistral_ids(self.text(turn_ids))


class Retool(ToolProtocol):
    """The inline format of the ReTool paper: one assistant message contains everything.

        <code>...</code> <interpreter>...</interpreter> ... <answer>

    </code> spans several tokens, and the last one may include the text that follows (">\\n"). The
    engine stops on a token that completes the tag. An engine without ``call_end`` support stops on
    every token that might complete it, and the loop resumes the turn with another request. Results
    are tokenized separately and never merged with the model's tokens. SFT must therefore split its
    text in the same places: after </code>, and after </interpreter> and its line break.
    """

    name = "retool"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._stop_at(CODE_END)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(retool_messages(messages), None, self.tokenizer)

    def clean(self, output: str) -> str:
        return RETOOL_MARKUP.sub(lambda match: f"{match[0][0]} {match[0][1:]}", super().clean(output))

    def ended(self, turn_ids: Sequence[int]) -> bool:
        return self._tag_ended(turn_ids, CODE_START, CODE_END)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return parse_retool(text)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        (result,) = results
        after = self.text(turn_ids).rpartition(CODE_END)[2]
        start = "" if after.endswith("\n") else "\n"
        return encode_piece(self.tokenizer, f"{start}<interpreter>\n{self.clean(result)}\n</interpreter>\n")


def checked_prompt(
    protocol: ToolProtocol, messages: Sequence[Message], max_prompt_tokens: int, where: str
) -> list[int]:
    """Token ids [T] of a prompt, never truncated.

    Raises DataError if the prompt has more than ``max_prompt_tokens`` tokens.
    """
    ids = protocol.prompt_ids(messages)
    if len(ids) > max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {max_prompt_tokens}. Raise "
            f"it, or leave the row out: {str(messages[-1].get('content'))[:200]!r}"
        )
    return ids


TOOL_TURNS: tuple[type[ToolTurns], ...] = (Hermes, Qwen3Coder, Llama3, Mistral)
# ``default_protocol`` tries them in this order. The inline protocol comes before Llama's and
# Mistral's, because their templates drop the text before a call.
PROTOCOLS: dict[str, type[ToolProtocol]] = {
    protocol.name: protocol for protocol in (Hermes, Qwen3Coder, Retool, Llama3, Mistral)
}


def default_protocol(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of the first built-in protocol that supports the tokenizer and its template.

    Raises CheckpointError with each protocol's reason if none does.
    """
    reasons: list[str] = []
    for name, protocol in PROTOCOLS.items():
        try:
            protocol(tokenizer)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return name
    why = "; ".join(dict.fromkeys(reasons))  # several protocols may fail for the same reason
    raise CheckpointError(f"the tokenizer of {name_of(tokenizer)!r} supports none of {', '.join(PROTOCOLS)}: {why}")


def open_protocol(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tool: bool = True,
    calls: Literal["first", "all"] = "first",
) -> ToolProtocol:
    """Create the protocol ``name``; without ``tool``, ``TextOnly``.

    ``calls``: "first" ends a turn at its first call; "all" allows several calls per turn, which run
    concurrently. Raises ConfigError for an unknown name, CheckpointError for an incompatible
    tokenizer, and any exception of a user-defined class.
    """
    chosen = protocol_class(name)
    if not tool:
        return TextOnly(tokenizer)
    protocol = chosen(tokenizer)
    if calls == "all":
        protocol.allow_parallel_calls()
    return protocol


def protocol_class(name: str) -> type[ToolProtocol]:
    """The class of a built-in or user-defined protocol. Raises ConfigError."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if ":" not in name:
        raise ConfigError(
            f"Unknown rollout.protocol = {name!r}. Choose one of: {', '.join(PROTOCOLS)}, or name a subclass of "
            'ToolProtocol as "module:Name".'
        )
    named = import_object("rollout.protocol", name)
    if not (isinstance(named, type) and issubclass(named, ToolProtocol)):
        raise ConfigError(
            f'rollout.protocol = "{name}" is not a subclass of retool_mcore.rollout.protocol.ToolProtocol: {named!r}.'
        )
    return named


def protocol_of(rollout: ToolLoop, tokenizer: PreTrainedTokenizerBase) -> ToolProtocol:
    """Create the protocol that [rollout] configures, with its tools.

    Raises like ``open_protocol``, and ConfigError for a tool that is missing or unsupported.
    """
    protocol = open_protocol(
        rollout.protocol,
        tokenizer,
        tool=rollout.tool,
        calls=rollout.calls_per_turn,
    )
    if rollout.tool:
        protocol.interpreter = TOOL_NAME in rollout.tools
        protocol.offer(tools_of(rollout))
    return protocol


def tools_of(rollout: ToolLoop) -> tuple[Tool, ...]:
    """The tools that [rollout] offers in addition to the interpreter. Raises ConfigError."""
    tools = (*open_tools(tuple(rollout.tools)), *(mcp_tools(rollout.mcp) if rollout.mcp else ()))
    if twice := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        raise ConfigError(f"rollout.tools and rollout.mcp have two tools named {', '.join(twice)}. Remove one.")
    return tools
