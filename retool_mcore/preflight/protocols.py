"""Checks before SFT that RL can use the model: its tokenizer must support the rows' protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from retool_mcore.config import SftConfig
from retool_mcore.config.base import is_tables
from retool_mcore.data.files import read_rows
from retool_mcore.data.tool import CODE_END
from retool_mcore.errors import CheckpointError
from retool_mcore.rollout.protocol import PROTOCOLS, TOOL_TURNS, Hermes, default_protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVIDENCE = {"hermes": "offers or calls tools", "retool": f"has code that ends in {CODE_END}"}


def check_protocols(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The protocols of an SFT run's rows, all supported by the tokenizer. Tokenizes nothing.

    Without this check, RL would refuse the model after SFT has finished. Raises CheckpointError
    that names the first row whose protocol the tokenizer does not support.
    """
    protocols: list[str] = []
    checked: set[str] = set()
    for _, file in config.data_files:
        for index, row in read_rows(file, ("messages", "tools")):
            for name in _protocols_of(row):
                if name in checked:
                    continue
                try:
                    served = _served(name, tokenizer)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{file}, row {index} {EVIDENCE[name]}. After SFT, RL needs rollout.protocol = "
                        f'"{name}", which model.path = {config.model.path} does not support: {error}. '
                        f"{_remedy(file, tokenizer)}"
                    ) from error
                checked.add(name)
                protocols.append(served)
    return tuple(protocols)


def _served(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The protocol in which this model's template renders rows of form ``name``.

    The template decides the protocol of rows with tool calls. Raises CheckpointError.
    """
    if name == Hermes.name:
        for protocol in TOOL_TURNS[1:]:
            with contextlib.suppress(CheckpointError):
                return protocol(tokenizer).name
    return PROTOCOLS[name](tokenizer).name


def _protocols_of(row: Mapping[str, Any]) -> Iterator[str]:
    messages = row["messages"]
    if not is_tables(messages):
        return  # reading the rows for training reports it
    if row["tools"] or any(message.get("tool_calls") for message in messages):
        yield "hermes"
    if any(message.get("role") == "assistant" and CODE_END in str(message.get("content")) for message in messages):
        yield "retool"


def _remedy(file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        name = default_protocol(tokenizer)
    except CheckpointError:
        return "It supports no protocol with tools. Use another model, or rows without tool calls"
    return (
        f"It supports {name}. Write the rows in that form: retool data sft {file} --protocol {name} --out OUT.parquet"
    )
