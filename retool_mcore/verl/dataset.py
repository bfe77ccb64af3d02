"""The dataset that verl's trainer reads, from parquet files in verl's format.

verl loads this class through data.custom_cls. It returns only the columns that we read, because
verl passes every column to the agent loop as an argument. A column ``agent_name`` would replace our
loop by one of verl's, and a column ``output`` or ``trace`` would end the run.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch.utils.data import ConcatDataset, Dataset

from retool_mcore.data.rl_prompts import messages_of, truth_of


class _File(Dataset[dict[str, Any]]):
    """The rows of one parquet file."""

    def __init__(self, path: str) -> None:
        self._table: Any = pq.read_table(path)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self._table.slice(item, 1).to_pylist()[0]


class ReToolDataset(Dataset[dict[str, Any]]):
    """Rows of one or more files, which may have different columns.

    ``row`` numbers the rows of all files from 0. Together with ``held_out`` (True for validation
    data) it identifies a trajectory's problem in every run on the same files.
    """

    held_out = False

    def __init__(self, data_files: Sequence[str], **_: Any) -> None:
        """Read the files; verl's other arguments concern its own preprocessing."""
        self._rows: ConcatDataset[dict[str, Any]] = ConcatDataset([_File(path) for path in data_files])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = self._rows[item]
        extra_info = row.get("extra_info") or {}
        return {
            "data_source": row["data_source"],
            "extra_info": extra_info,
            "index": extra_info.get("index", 0),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl 0.9.1 needs a tensor in each batch
            "raw_prompt": messages_of(row["prompt"]),
            "reward_model": {"ground_truth": truth_of(row["reward_model"])},
            "row": int(item),
            "held_out": self.held_out,
        }
