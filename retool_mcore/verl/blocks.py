"""The rows of a batch in verl's queue, a block of tokens at a time and unpadded.

What a step holds at once does not grow with its tokens, nor with its longest response.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Block:
    """Rows of a batch with some of their columns; ``column`` tells how long each response is."""

    partition_id: str
    keys: list[str]
    columns: Any
    column: str

    @property
    def offsets(self) -> torch.Tensor:
        """Where each row begins, and the last one ends [R + 1]."""
        return self.columns[self.column].offsets()

    @property
    def lengths(self) -> torch.Tensor:
        return self.offsets.diff()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return self.offsets[:-1].numpy()

    def tokens(self, name: str) -> torch.Tensor:
        """A column of all its rows' tokens [N]."""
        return self.columns[name].values()

    def sums(self, values_N: torch.Tensor) -> npt.NDArray[Any]:
        """Of each row's tokens [R]; of fractions in 64 bits."""
        wide = np.float64 if values_N.is_floating_point() else None
        return np.add.reduceat(values_N.numpy(), self.starts, dtype=wide)

    def row_sums(self, name: str) -> npt.NDArray[Any]:
        """A column's sum over each row's tokens [R]."""
        return self.sums(self.tokens(name))

    def responses(self, name: str) -> torch.Tensor:
        """[N] of a model's output at prompt and response: what it said of each response token."""
        values, ends = self.tokens(name), self.columns[name].offsets()[1:].tolist()
        cut = zip(ends, self.lengths.tolist(), strict=True)
        return torch.cat([values[end - length - 1 : end - 1] for end, length in cut])

    def put(self, **columns_N: torch.Tensor) -> None:
        """Store columns of tokens in the queue, for the block's rows."""
        nested = {
            name: torch.nested.nested_tensor_from_jagged(values.contiguous(), self.offsets)
            for name, values in columns_N.items()
        }
        tq.kv_batch_put(
            keys=self.keys, partition_id=self.partition_id, fields=TensorDict(nested, batch_size=len(self.keys))
        )


def blocks(batch: KVBatchMeta, *names: str, but: Container[str] = ()) -> Iterator[Block]:
    """The batch in order, with columns of which the first has the length of the responses.

    ``but``: rows that are left out.
    """
    rows = [(key, tag.get("seq_len", 0)) for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in but]
    for keys in _cut(rows):
        columns = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names))
        yield Block(batch.partition_id or "", keys, columns, names[0])


def put_values(batch: KVBatchMeta, **columns_R: torch.Tensor) -> None:
    """Store columns with one value for each row, which are far cheaper than those of tokens."""
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict({**columns_R}, batch_size=len(batch.keys)),
    )


def values_of_rows(keys: Sequence[str], partition_id: str | None, *names: str) -> list[list[Any]]:
    """Columns with one value for each row, such as its name."""
    columns = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=list(names))
    return [_plain(columns[name]) for name in names]


def _plain(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return column.tolist()
    return [getattr(value, "data", value) for value in column]


def _cut(rows: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
    """Runs of keys of up to BLOCK_TOKENS by their lengths, and of one row at least."""
    run, tokens = list[str](), 0
    for key, length in rows:
        if run and tokens + length > BLOCK_TOKENS:
            yield run
            run, tokens = [], 0
        run.append(key)
        tokens += length
    if run:
        yield run
