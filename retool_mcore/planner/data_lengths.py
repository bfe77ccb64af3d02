"""Measures the lengths of a run's prompts or rows, with its tokenizer and chat template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from retool_mcore.config import RlConfig, SftConfig
from retool_mcore.config.files import parquet_files
from retool_mcore.data.chat import parse_tools, render
from retool_mcore.data.files import read_rows
from retool_mcore.data.rl_prompts import messages_of
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.rollout.protocol import protocol_of

ROWS = 512  # minimum number of rows to render, evenly spaced over a file; takes about a second


@dataclass(frozen=True)
class FileLengths:
    """Token lengths in a data file: of prompts for RL, of whole conversations for SFT."""

    mean: float
    shortest: int
    longest: int
    note: str


def lengths_of_data_file(config: SftConfig | RlConfig) -> FileLengths | None:
    """The lengths in data.train_file; None if it or the tokenizer is not on this machine.

    Raises DataError for an invalid row, as the start of the run would.
    """
    if not Path(config.model.path).is_dir() or not all(Path(file).is_file() for file in _files(config)):
        return None
    tokenizer = tokenizer_of(config.model)
    if isinstance(config, RlConfig):
        protocol = protocol_of(config.rollout, tokenizer)
        lengths, count = _row_lengths(
            config, ("prompt",), lambda row: len(protocol.prompt_ids(messages_of(row["prompt"])))
        )
    else:
        source = config.data.train_file

        def rendered(row: Mapping[str, Any]) -> int:
            return len(render(row["messages"], parse_tools(row["tools"], source), tokenizer))

        lengths, count = _row_lengths(config, ("messages", "tools"), rendered)
    counted = f"{count} rows" if count == len(lengths) else f"{len(lengths)} of {count} rows"
    what = f"{'prompts' if isinstance(config, RlConfig) else 'rows'} of {config.data.train_file}"
    note = f"{what} have {fmean(lengths):,.0f} tokens on average and {max(lengths):,} at most ({counted})"
    return FileLengths(fmean(lengths), min(lengths), max(lengths), note)


def _files(config: SftConfig | RlConfig) -> list[str]:
    path = config.data.train_file
    return parquet_files(path) if Path(path).exists() else [path]


def _row_lengths(
    config: SftConfig | RlConfig, columns: Sequence[str], tokens_of: Callable[[Mapping[str, Any]], int]
) -> tuple[list[int], int]:
    """The token lengths of the rendered rows, and the total number of rows."""

    def rows() -> Iterator[dict[str, Any]]:
        return (row for file in _files(config) for _, row in read_rows(file, columns))

    count = sum(1 for _ in rows())
    every = max(1, count // ROWS)
    return [tokens_of(row) for number, row in enumerate(rows()) if number % every == 0], count
