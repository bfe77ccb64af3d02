"""SFT says which rows of its files it does not train on."""

from __future__ import annotations

import io

from rich.console import Console

from retool_mcore.data.sft import SftDataset
from retool_mcore.train.sft import tell_left_out


def test_a_note_for_each_file_that_has_rows_too_long():
    whole, cut = SftDataset("val.parquet", (), ()), SftDataset("runs/train.parquet", (), (3, 7))
    terminal = io.StringIO()
    tell_left_out((cut, whole), 512, Console(file=terminal, width=40))
    assert terminal.getvalue() == (
        "note: runs/train.parquet: 2 of 2 rows are longer than data.max_length_tokens = 512 and left out, the first of "
        "them row 3\n"
    )
