"""What RL will ask of the tokenizer, told before SFT: its rows are in the form of a protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from retool_mcore.config import SftConfig
from retool_mcore.config.base import is_tables
from retool_mcore.config.files import parquet_files
from retool_mcore.data.files import read_rows
from retool_mcore.data.tool import CODE_END
from retool_mcore.errors import CheckpointError
from retool_mcore.rollout.protocol import PROTOCOLS, TOOL_TURNS, Hermes, serving_protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = {"hermes": "offers or calls tools", "retool": f"has code that ends in {CODE_END}"}


def check_protocols(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The protocols that the rows of an SFT run are in, each served by the tokenizer.

    Without it SFT would run to its end, and RL refuse the model that it made. Nothing is tokenized.
    Raises CheckpointError naming the first row whose protocol the tokenizer does not serve.
    """
    found: list[str] = []
    asked: set[str] = set()
    for file in (file for _, path in config.data_files for file in parquet_files(path)):
        for index, row in read_rows(file, ("messages", "tools")):
            for name in _protocols_of(row):
                if name in asked:
                    continue
                try:
                    served = _served(name, tokenizer)
                except CheckpointError as error:
                    raise CheckpointError(
                        f'{file}, row {index} {SHOWN[name]}: after SFT, RL asks for rollout.protocol = "{name}", which '
                        f"model.path = {config.model.path} does not serve: {error}. {_remedy(file, tokenizer)}"
                    ) from error
                asked.add(name)
                found.append(served)
    return tuple(found)


def _served(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The protocol that a row in the form of ``name`` is in, with this model's template.

    Rows with tool calls are in the form that the template writes. Raises CheckpointError.
    """
    if name == Hermes.name:
        for protocol in TOOL_TURNS[1:]:
            with contextlib.suppress(CheckpointError):
                return protocol(tokenizer).name
    return PROTOCOLS[name](tokenizer).name


def _protocols_of(row: Mapping[str, Any]) -> Iterator[str]:
    messages = row["messages"]
    if not is_tables(messages):
        return  # reading the rows for training tells it
    if row["tools"] or any(message.get("tool_calls") for message in messages):
        yield "hermes"
    if any(message.get("role") == "assistant" and CODE_END in str(message.get("content")) for message in messages):
        yield "retool"


def _remedy(file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        name = serving_protocol(tokenizer)
    except CheckpointError:
        return "It serves no protocol with tools: take another model, or rows in words alone"
    return f"It serves {name}: write the rows in that form (retool data sft {file} --protocol {name} --out OUT.parquet)"
