"""Tool protocols render prompts, define stop tokens, parse model turns and render tool results.

``PROTOCOLS`` lists the built-in ones. ``rollout.protocol = "module:Name"`` selects a user-defined
subclass of ``ToolProtocol``. The loop only uses the base class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from retool_mcore.config import ToolLoop
from retool_mcore.config.named import load_named
from retool_mcore.data import chat
from retool_mcore.data.chat import encode_piece, name_of
from retool_mcore.data.prompt_format import retool_messages
from retool_mcore.data.tool import CODE_END, CODE_START, TOOL_NAME
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.rollout.mcp import mcp_tools
from retool_mcore.rollout.tool_call import Parsed, parse_retool
from retool_mcore.rollout.tool_protocol import Message, TextOnly, ToolProtocol
from retool_mcore.rollout.tool_turns import Hermes, Llama3, Mistral, Qwen3Coder, ToolTurns
from retool_mcore.rollout.tools import Tool, open_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETOOL_MARKUP = re.compile(r"</?(?:code|interpreter|answer)>")


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
# ``serving_protocol`` tries them in this order. The inline protocol comes before Llama's and
# Mistral's, because their templates drop the text before a call.
PROTOCOLS: dict[str, type[ToolProtocol]] = {
    protocol.name: protocol for protocol in (Hermes, Qwen3Coder, Retool, Llama3, Mistral)
}


def serving_protocol(tokenizer: PreTrainedTokenizerBase) -> str:
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
    told = "; ".join(dict.fromkeys(reasons))  # several protocols may fail for the same reason
    raise CheckpointError(f"the tokenizer of {name_of(tokenizer)!r} serves none of {', '.join(PROTOCOLS)}: {told}")


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
    found = protocol_class(name)
    if not tool:
        return TextOnly(tokenizer)
    protocol = found(tokenizer)
    if calls == "all":
        protocol.allow_parallel_calls()
    return protocol


def protocol_class(name: str) -> type[ToolProtocol]:
    """The class of a built-in or user-defined protocol. Raises ConfigError."""
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
        raise ConfigError(f"rollout.tools and rollout.mcp have two tools named {', '.join(twice)}. Leave one out.")
    return tools
