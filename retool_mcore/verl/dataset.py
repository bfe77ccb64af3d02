"""The rows that verl's trainer hands to our agent loop, from files of verl's own scripts or others.

verl loads this class through data.custom_cls. Only the columns that we read are passed on. verl
would hand any other column to the agent loop under its own name: ``agent_name`` would replace our
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
    """What `datasets` reads it first copies, for ever and below HOME, which may not be writable.

    Here the copy is in TMPDIR; once it is mapped it needs no name.
    """
    kept = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(prefix="retool_rows_") as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = kept


class ReToolDataset(Dataset[dict[str, Any]]):
    """Rows of one or several files, which may have different columns.

    A row's ``row`` counts from 0 through all files. Together with ``held_out`` (True for validation
    data) it identifies the problem of a trajectory in every run on the same files.
    """

    held_out = False

    def __init__(self, data_files: Sequence[str], **settings: Any) -> None:
        with _no_copy_kept():  # one of verl's data sets a file: it refuses files whose structs differ
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
