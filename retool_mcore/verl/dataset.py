"""The rows that verl's trainer hands to our agent loop, of files as verl's own scripts write them
and others.

Chosen through data.custom_cls. Of a file's columns only those go on that we read: any other is
handed to the agent loop by its name, where ``agent_name`` puts one of verl's loops into ours's
place and ``output`` or ``trace`` ends the run.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from retool_mcore.data.rl_prompts import messages_of, truth_of

READ = ("data_source", "extra_info", "index", "dummy_tensor")


class ReToolDataset(RLHFDataset):
    """Rows of one or several files, whose columns need not be alike.

    A row's ``row`` counts through all files from 0; with ``held_out``, True of what is validated
    on, it tells which problem a trajectory is of, in every run of the same files.
    """

    held_out = False

    def _read_files_and_tokenize(self) -> None:
        files, parts = self.data_files, []
        for file in files:  # verl concatenates tables, and refuses two whose structs differ
            self.data_files = [file]
            super()._read_files_and_tokenize()
            parts.append(self.dataframe)
        self.data_files = files
        self.dataframe: Any = ConcatDataset(parts)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        return {
            **{name: row[name] for name in READ},
            "raw_prompt": messages_of(row["prompt"]),
            "reward_model": {"ground_truth": truth_of(row["reward_model"])},
            "row": int(item),
            "held_out": self.held_out,
        }
