"""Tool protocols: they render prompts, name stop tokens, read model turns and write results.

Each protocol is one small class, and the loop knows none of them by name. ``PROTOCOLS`` has ours;
``rollout.protocol = "module:Name"`` names a subclass of ``ToolProtocol`` of a user's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from retool_mcore.config import ToolLoop
from retool_mcore.config.named import load_named
from retool_mcore.data import chat
from retool_mcore.data.prompt_format import retool_messages
from retool_mcore.data.tokenizer import encode_piece, name_of
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
        return encode_piece(self.tokenizer, f"{start}<interpreter>\n{self.clean(result)}\n</interpreter>\n")


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


TOOL_TURNS: tuple[type[ToolTurns], ...] = (Hermes, Qwen3Coder, Llama3, Mistral)
# In the order in which ``serving_protocol`` asks them. The templates of Llama and Mistral leave out
# what the model says before a call, so the inline form comes first.
PROTOCOLS: dict[str, type[ToolProtocol]] = {
    protocol.name: protocol for protocol in (Hermes, Qwen3Coder, Retool, Llama3, Mistral)
}


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
) -> ToolProtocol:
    """The protocol of this name.

    ``calls``: "first" cuts a turn at its first call, "all" allows several, which run side by side.
    Raises ConfigError for an unknown name, CheckpointError for an unfit tokenizer, and whatever a
    user's own class raises.
    """
    found = protocol_class(name)
    if not tool:
        return TextOnly(tokenizer)
    protocol = found(tokenizer)
    if calls == "all":
        protocol.allow_parallel_calls()
    return protocol


def protocol_class(name: str) -> type[ToolProtocol]:
    """The protocol of this name, one of ours or a user's own. Raises ConfigError."""
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
    """The protocol that a run's [rollout] section asks for, with its tools; see ``open_protocol``.

    Raises ConfigError, too, for a tool that is not found or cannot be offered.
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
    """What [rollout] offers beside the interpreter. Raises ConfigError."""
    tools = (*open_tools(tuple(rollout.tools)), *(mcp_tools(rollout.mcp) if rollout.mcp else ()))
    if twice := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        raise ConfigError(f"rollout.tools and rollout.mcp have two tools named {', '.join(twice)}. Leave one out.")
    return tools
