"""Tool protocols: they render prompts, name stop tokens, read model turns and write results.

Each protocol is one small class, and the loop knows none of them by name. ``PROTOCOLS`` has ours;
``rollout.protocol = "module:Name"`` names a subclass of ``ToolProtocol`` of a user's own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from retool_mcore.config import ToolLoop
from retool_mcore.config.named import load_named
from retool_mcore.data import chat
from retool_mcore.data.call_tags import closes
from retool_mcore.data.prompts import retool_messages
from retool_mcore.data.tokenizer import decode, encode, name_of
from retool_mcore.data.tool import CALL_END, CALL_START, CODE_END, CODE_INTERPRETER, CODE_START
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.platforms.call_end import CallEnd
from retool_mcore.reward.extract import last_answer
from retool_mcore.rollout.mcp import mcp_tools
from retool_mcore.rollout.tool_call import (
    CallReader,
    Parsed,
    parse_hermes,
    parse_retool,
)
from retool_mcore.rollout.tool_output import cut_middle
from retool_mcore.rollout.tools import Tool, open_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

RETOOL_MARKUP = re.compile(r"</?(?:code|interpreter|answer)>")


class ToolProtocol(ABC):
    """How the model and its tools talk. Holds the tokenizer, but no state of a trajectory.

    ``tools`` are those beside the interpreter. ``end_ids`` are the tokens that close a model turn.
    ``stop_token_ids`` are these and the tokens that complete a call: the engine ends a turn at the
    first of them that it samples, and returns it as the turn's last token. ``call_end``, if not
    None, tells which of them complete no call; an engine that knows it goes on there.
    """

    name: str
    end_ids: tuple[int, ...]
    tools: tuple[Tool, ...] = ()
    first_reader: CallReader | None = None
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
        ids = encode(self.tokenizer, tag)
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
        """The turn as text, without the control token that closed it; tool tags stay."""
        closed = bool(turn_ids) and turn_ids[-1] in self.end_ids
        return decode(self.tokenizer, turn_ids[: len(turn_ids) - closed], clean_up=False)


class TextOnly(ToolProtocol):
    """No interpreter: the baseline of the paper's comparison.

    One turn is the whole response, and tags mean nothing.
    """

    name = "text"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return chat.render_prompt(messages, None, self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        answer = last_answer(text)
        return Parsed(kind="text") if answer is None else Parsed(kind="answer", answer=answer)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        raise AssertionError("a text-only trajectory has no results to write")


class Hermes(ToolProtocol):
    """Qwen2.5's form: <tool_call>JSON</tool_call>; the result comes back as a tool message.

    A turn ends at its first call, on that call's last token; with a tokenizer that splits the tag,
    on the token that completes it. After ``allow_parallel_calls`` the model goes on to <|im_end|>,
    and the calls of the turn run side by side.
    """

    name = "hermes"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        chat.require_tool_turns(tokenizer)
        self._stop_at(CALL_END)

    def ended(self, turn_ids: Sequence[int]) -> bool:
        return self._tag_ended(turn_ids, CALL_START, CALL_END)

    def offer(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)

    def allow_parallel_calls(self) -> None:
        self.stop_token_ids, self.call_end = self.end_ids, None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        schemas = [CODE_INTERPRETER, *(tool.schema for tool in self.tools)]
        return chat.render_prompt(messages, schemas, self.tokenizer)

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return parse_hermes(text, self.first_reader, self.tools)

    def result_ids(self, turn_ids: Sequence[int], results: Sequence[str]) -> list[int]:
        ids = chat.tool_turn_ids(self.tokenizer, results)
        # A turn that the model closed itself already holds the template's first token.
        return ids[1:] if turn_ids[-1] == self.format.end_of_turn_id else ids


class Retool(ToolProtocol):
    """The paper's form, all in one assistant message.

        <code>...</code> <interpreter>...</interpreter> ... <answer>

    </code> is several tokens, and the last of them may also hold what follows (">\\n"). The engine
    stops on a token that completes the tag. An engine that does not know ``call_end`` stops on
    every token that can, and the turn goes on by another request. Results are written as tokens of
    their own and never merged with the model's. SFT must therefore split
    its text in the same places: after </code>, and after </interpreter> and its line break.
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
        return encode(self.tokenizer, f"{start}<interpreter>\n{self.clean(result)}\n</interpreter>\n")


def checked_prompt(
    protocol: ToolProtocol, messages: Sequence[Message], max_prompt_tokens: int, where: str
) -> list[int]:
    """Token ids [T] of a prompt, never cut.

    Raises DataError when the prompt has more than data.max_prompt_tokens.
    """
    ids = protocol.prompt_ids(messages)
    if len(ids) > max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {max_prompt_tokens}. Raise "
            f"it, or leave the row out: {str(messages[-1].get('content'))[:200]!r}"
        )
    return ids


PROTOCOLS: dict[str, type[ToolProtocol]] = {protocol.name: protocol for protocol in (Hermes, Retool)}


def serving_protocol(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of the first of our protocols that the tokenizer and its template serve.

    Raises CheckpointError with the reason of each when they serve none.
    """
    reasons: list[str] = []
    for name, protocol in PROTOCOLS.items():
        try:
            protocol(tokenizer)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return name
    told = "; ".join(dict.fromkeys(reasons))  # a template without a turn's end is one reason for both
    raise CheckpointError(f"the tokenizer of {name_of(tokenizer)!r} serves none of {', '.join(PROTOCOLS)}: {told}")


def open_protocol(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tool: bool = True,
    calls: Literal["first", "all"] = "first",
    first_reader: CallReader | None = None,
) -> ToolProtocol:
    """The protocol of this name. ``first_reader``: the engine's own reader, tried before ours.

    ``first_reader`` reads hermes calls. ``calls``: "first" cuts a turn at its first call, "all"
    allows several, which run side by side. Raises ConfigError for an unknown name, CheckpointError
    for an unfit tokenizer, and whatever a user's own class raises.
    """
    found = _class_of(name)
    if not tool:
        return TextOnly(tokenizer)
    protocol = found(tokenizer)
    if calls == "all":
        protocol.allow_parallel_calls()
    protocol.first_reader = first_reader
    return protocol


def _class_of(name: str) -> type[ToolProtocol]:
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if ":" not in name:
        raise ConfigError(
            f'rollout.protocol = {name!r} is none of {", ".join(PROTOCOLS)}, nor of the form "module:Name".'
        )
    found = load_named("rollout.protocol", name)
    if not (isinstance(found, type) and issubclass(found, ToolProtocol)):
        raise ConfigError(
            f'rollout.protocol = "{name}" is no subclass of retool_mcore.rollout.protocol.ToolProtocol: {found!r}.'
        )
    return found


def protocol_of(
    rollout: ToolLoop, tokenizer: PreTrainedTokenizerBase, *, first_reader: CallReader | None = None
) -> ToolProtocol:
    """The protocol that a run's [rollout] section asks for, with its tools; see ``open_protocol``.

    Raises ConfigError, too, for a tool that is not found or cannot be offered.
    """
    protocol = open_protocol(
        rollout.protocol,
        tokenizer,
        tool=rollout.tool,
        calls=rollout.calls_per_turn,
        first_reader=first_reader,
    )
    if rollout.tool:
        protocol.offer(tools_of(rollout))
    return protocol


def tools_of(rollout: ToolLoop) -> tuple[Tool, ...]:
    """What [rollout] offers beside the interpreter. Raises ConfigError."""
    tools = (*open_tools(tuple(rollout.tools)), *(mcp_tools(rollout.mcp) if rollout.mcp else ()))
    if twice := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        raise ConfigError(f"rollout.tools and rollout.mcp have two tools named {', '.join(twice)}. Leave one out.")
    return tools
