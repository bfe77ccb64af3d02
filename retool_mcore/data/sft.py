"""Loads SFT rows from parquet, tokenizes them once, and assigns them to batches.

A batch is a pure function of (seed, step).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from retool_mcore.config.base import is_tables
from retool_mcore.data.chat import TokenizedChat, parse_tools, render
from retool_mcore.data.files import read_rows
from retool_mcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SftDataset:
    """Tokenized conversations. Rows over the length limit are dropped, never truncated."""

    source: str
    examples: Sequence[TokenizedChat]
    too_long: tuple[int, ...]  # indices of the dropped rows, from 0 across all files
    max_length_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(example) for example in self.examples)

    def dropped_note(self) -> str | None:
        """A note about dropped rows for the user; None if no row was dropped."""
        if not self.too_long:
            return None
        rows = len(self.examples) + len(self.too_long)
        return (
            f"{self.source}: {len(self.too_long)} of {rows} rows are longer than data.max_length_tokens = "
            f"{self.max_length_tokens} and left out; the first is row {self.too_long[0]}"
        )


def load_sft(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length_tokens: int) -> SftDataset:
    """Read and tokenize rows {messages, tools} of parquet ``files``.

    ``tools`` is null in a text-only row. Raises DataError with file, row and column for a row with
    another schema, and if no row fits ``max_length_tokens``.
    """
    source = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    examples: list[TokenizedChat] = []
    too_long: list[int] = []
    rows = ((file, *row) for file in files for row in read_rows(file, ("messages", "tools")))
    for number, (file, index, row) in enumerate(rows):
        where = f"{file}, row {index}"
        messages = row["messages"]
        if not is_tables(messages):
            raise DataError(f"{where}, column messages: {type(messages).__name__}, not a list of messages")
        tools = parse_tools(row["tools"], where)
        try:
            rendered = render(messages, tools, tokenizer)
        except DataError as error:
            raise DataError(f"{where}, column messages: {error}") from error
        if not any(rendered.loss_mask):
            raise DataError(f"{where}, column messages: no assistant turn is trained on")
        if len(rendered) > max_length_tokens:
            too_long.append(number)
        else:
            examples.append(rendered.compact())
    if not examples:
        raise DataError(
            f"{source}: all {len(too_long)} rows are longer than data.max_length_tokens = {max_length_tokens}"
        )
    return SftDataset(source, examples, tuple(too_long), max_length_tokens)


@dataclass(frozen=True)
class BatchesOfRank:
    """The batches of one data-parallel rank. The step number is the only state.

    Rows are streamed epoch by epoch; (seed, epoch) determines each epoch's shuffle. A step takes
    the next ``global_batch`` rows of the stream, for any dp_size, and assigns them to the ranks:
    the same number of rows to each, balanced greedily by cost. The cost is the number of tokens,
    plus attention if ``hidden_size`` is set. verl's engine packs a rank's rows into micro-batches,
    which it also balances by cost. There is no attention across sequences.
    """

    examples: Sequence[TokenizedChat]
    global_batch: int
    seed: int
    dp_size: int = 1
    dp_rank: int = 0
    shuffle: bool = True
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        if self.global_batch % self.dp_size or not 0 <= self.dp_rank < self.dp_size or not self.examples:
            raise DataError(
                f"cannot split a batch of {self.global_batch} equally over {self.dp_size} ranks "
                f"(rank {self.dp_rank}, {len(self.examples)} examples)"
            )

    def __call__(self, step: int) -> list[TokenizedChat]:
        """The sequences of this rank at ``step`` (from 1), in stream order."""
        rows = self.rows(step)
        shares = deal([cost(len(self.examples[row]), self.hidden_size) for row in rows], self.dp_size)
        return [self.examples[rows[position]] for position in shares[self.dp_rank]]

    def rows(self, step: int) -> list[int]:
        """Row indices of the global batch at ``step`` (from 1), the same for every dp_size."""
        assert step >= 1, f"steps count from 1, got {step}"
        first = (step - 1) * self.global_batch
        total = len(self.examples)
        wanted = range(first, first + self.global_batch)
        orders = {epoch: self._order(epoch) for epoch in range(first // total, wanted[-1] // total + 1)}
        return [int(orders[position // total][position % total]) for position in wanted]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.examples))
        # RandomState, because NumPy guarantees a stable stream for it but not for Generator.
        bits = np.random.MT19937(np.random.SeedSequence((self.seed, epoch)))
        return np.random.RandomState(bits).permutation(len(self.examples))


def cost(num_tokens: int, hidden_size: int | None = None) -> float:
    """Compute cost of one sequence, in units of one token of a short sequence.

    In the forward pass of a layer with hidden size h, a token costs 24 h^2 FLOPs in the matrix
    products and 2 h T FLOPs in causal attention over T tokens. Both are equal at T = 12 h.
    """
    return num_tokens if hidden_size is None else num_tokens * (1 + num_tokens / (12 * hidden_size))


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign positions to ranks, the same number to each, balanced by cost.

    Greedy: in order of decreasing cost, each sequence goes to the least-loaded rank with room left.
    """
    room = len(costs) // num_ranks
    assert room * num_ranks == len(costs), f"{len(costs)} sequences do not divide over {num_ranks} ranks"
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        load, rank = heapq.heappop(ranks)
        shares[rank].append(position)
        if len(shares[rank]) < room:
            heapq.heappush(ranks, (load + costs[position], rank))
    return [sorted(share) for share in shares]


def validation_batches(
    files: Sequence[SftDataset], global_batch: int, *, dp_size: int, dp_rank: int
) -> list[list[TokenizedChat]]:
    """This rank's part of all rows of ``files``, in batches.

    A batch has about ``global_batch`` rows over all ranks. Raises DataError if there are fewer rows
    than ranks.
    """
    examples = [example for data in files for example in data.examples]
    if len(examples) < dp_size:
        names = ", ".join(data.source for data in files)
        raise DataError(f"{names} has {len(examples)} usable rows, fewer than the {dp_size} data-parallel ranks")
    num_batches = max(1, len(examples) // global_batch)
    bounds = [len(examples) * i // num_batches for i in range(num_batches + 1)]
    return [list(examples[start + dp_rank : end : dp_size]) for start, end in pairwise(bounds)]
