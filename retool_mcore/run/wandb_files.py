"""Which steps the files of Weights & Biases hold: what it was given is there only later."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format; the file's own header has 7 bytes, too
WHOLE, LAST = 1, 4  # kinds of a record's parts


def steps_on_disk(folder: Path, run_id: str) -> set[int]:
    """The steps in all ``*.wandb`` files of a run below ``folder``, each start's among them."""
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    found = (record.FromString(raw) for path in folder.glob(f"*/run-{run_id}.wandb") for raw in _records(path))
    return {each.history.step.num for each in found if each.HasField("history")}


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, up to one that a kill cut short."""
    raw, at, parts = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(raw):
        if (room := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += room
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        at += HEADER_BYTES + length
        if at > len(raw) or kind == 0:
            return
        parts += raw[at - length : at]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
