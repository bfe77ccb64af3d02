"""Downloads and converts the public data sets that the shipped configurations use.

These are ReTool's SFT traces, DAPO-Math-17k, and AIME 2024 and 2025. They come from the Hugging
Face hub or, offline, from a local folder.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retool_mcore.data.convert import Conversion, conversations, convert_sft
from retool_mcore.data.files import read_source, source_files, write_jsonl, write_parquet
from retool_mcore.data.prompt_format import problem_of
from retool_mcore.data.rl import convert_rl
from retool_mcore.data.split import hold_out_rows
from retool_mcore.errors import DataError

VAL_ROWS = 100  # of the 2000 rows of ReTool-SFT; the published guide validates on the training file


@dataclass(frozen=True)
class Published:
    """A data set on the hub, and the files made from it."""

    hub: str
    files: tuple[str, ...]
    split: str = "train"


SFT = Published("JoeYing/ReTool-SFT", ("retool_sft_train.parquet", "retool_sft_val.parquet"))
RL = (
    Published("BytedTsinghua-SIA/DAPO-Math-17k", ("dapo_math_17k.parquet",)),
    Published("Maxwell-Jia/AIME_2024", ("aime_2024.parquet",), "test"),
    Published("yentinglin/aime_2025", ("aime_2025.parquet",), "test"),
)
GSM8K = Published("openai/gsm8k", ("gsm8k/train.jsonl", "gsm8k/test.jsonl"))
SOCRATIC = "socratic"  # another folder of GSM8K: the same problems with other solutions


def fetch(folder: Path, local: Path | None, on_line: Callable[[str], None], only: str = "") -> None:
    """Write the incomplete data sets to ``folder``, and pass one line per data set to ``on_line``.

    ``only``: fetch only this data set, by its hub name; also supports openai/gsm8k. ``local``: a
    folder with copies of data sets at ``local/owner/name`` or ``local/name``. Raises DataError for
    an unknown name, and for the first data set that is missing; the message has the expected path.
    """
    known = {published.hub: published for published in (SFT, *RL, GSM8K)}
    if only and only not in known:
        raise DataError(f"Unknown data set --only {only}. Choose one of: {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    for published in (known[only],) if only else (SFT, *RL):
        if all((folder / file).exists() for file in published.files):
            on_line(f"{published.hub}: {' and '.join(published.files)} already exist")
            continue
        places = [local / published.hub, local / Path(published.hub).name] if local else []
        try:
            if local and not any(place.exists() for place in places):
                raise DataError(f"neither {places[0]} nor {places[1]} exists")
            source = next((str(place) for place in places if place.exists()), published.hub)
            lines = _make(published, folder, source)
        except DataError as error:
            raise DataError(
                f"{published.hub} is missing: {error}. Without a network, copy it and the other data sets to "
                f"{local or 'HUB'}/owner/name and add --local {local or 'HUB'}. The files written so far are kept"
            ) from error
        on_line(f"{published.hub}: {'; '.join(lines)}")


def _make(published: Published, folder: Path, source: str) -> list[str]:
    if published is GSM8K:
        return [_copy_split(source, folder / file, Path(file).stem) for file in published.files]
    if published is SFT:
        report = asyncio.run(convert_sft(list(conversations(read_source(source))), Conversion()))
        parts = training_and_validation(report.rows)
    else:
        (file,) = published.files
        report = convert_rl(read_source(source), Path(file).stem, published.split)
        parts = (report.rows,)
    for file, rows in zip(published.files, parts, strict=True):
        write_parquet(folder / file, rows)
    counts = [f"{len(rows)} rows in {folder / file}" for file, rows in zip(published.files, parts, strict=True)]
    return [*counts, *([f"{len(report.rejects)} rejected"] if report.rejects else [])]


def _copy_split(source: str, out: Path, split: str) -> str:
    """Copy the rows of one split to JSON lines; return a one-line summary."""
    files = [file for file in source_files(source, split) if SOCRATIC not in file.parts]
    rows = [row for file in files for _, row in read_source(str(file))]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(out, rows)
    return f"{len(rows)} rows in {out}"


def training_and_validation(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], ...]:
    """Split rows into training and validation; no problem is in both.

    Validation gets at least min(VAL_ROWS, a tenth of the rows), plus other rows of its problems.
    """
    questions = [next(turn["content"] for turn in row["messages"] if turn["role"] == "user") for row in rows]
    return hold_out_rows([problem_of(question) for question in questions], rows, min(VAL_ROWS, len(rows) // 10), seed=0)
