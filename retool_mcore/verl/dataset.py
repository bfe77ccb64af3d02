"""The dataset that verl's trainer reads, from parquet files in verl's format.

verl loads this class through data.custom_cls. It returns only the columns that we read, because
verl passes every column to the agent loop as an argument: a column ``agent_name`` would replace our
loop by one of verl's, and ``output`` or ``trace`` would end the run.
"""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import ConcatDataset, Dataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from retool_mcore.data.rl_prompts import messages_of, truth_of

READ = ("data_source", "extra_info", "index", "dummy_tensor")


@contextmanager
def _no_copy_kept() -> Generator[None]:
    """Put the cache of `datasets` into TMPDIR and delete its files after loading.

    By default `datasets` keeps a copy of each file below HOME for ever, and HOME may be read-only.
    A mapped file stays readable after it is deleted.
    """
    kept = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(prefix="retool_rows_") as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = kept


class ReToolDataset(Dataset[dict[str, Any]]):
    """Rows of one or more files, which may have different columns.

    ``row`` numbers the rows of all files from 0. Together with ``held_out`` (True for validation
    data) it identifies a trajectory's problem in every run on the same files.
    """

    held_out = False

    def __init__(self, data_files: Sequence[str], **settings: Any) -> None:
        with _no_copy_kept():  # one dataset of verl's per file, because it rejects files of different structs
            self._rows: Any = ConcatDataset([RLHFDataset(data_files=[file], **settings) for file in data_files])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = self._rows[item]
        return {
            **{name: row[name] for name in READ},
            "raw_prompt": messages_of(row["prompt"]),
            "reward_model": {"ground_truth": truth_of(row["reward_model"])},
            "row": int(item),
            "held_out": self.held_out,
        }
