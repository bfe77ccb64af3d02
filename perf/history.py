"""Prints the records of past measurements and attempts in perf/history.jsonl, oldest first.

    python perf/history.py --titles                        # one line per record
    python perf/history.py --topic sandbox                 # the records of one topic
    python perf/history.py --since 2026-11-24 DeepGEMM     # since a day, with a word

Each line of the file is a record. RESULTS.md has the current figures, and LOG.md a row for each
attempt.
"""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from retool_mcore.cli.common import guarded
from retool_mcore.errors import DataError

DAYS = ["%Y-%m-%d"]
HISTORY = Path(__file__).with_name("history.jsonl")


class Record(BaseModel):
    """One measurement or one attempt. ``text`` is Markdown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: date
    commit: str
    """One or several commits; empty if unknown."""
    hardware: str
    topics: list[str]
    kind: Literal["measured", "tried"]
    command: str
    title: str
    text: str

    def line(self) -> str:
        return f"{self.date}  {self.hardware:20}  {self.title}  [{', '.join(self.topics)}]"

    def page(self) -> str:
        origin = ", ".join(part for part in (str(self.date), self.commit, self.hardware) if part)
        return f"## {self.title}\n\n{origin}; {', '.join(self.topics)}\n\n{self.text}\n"


def read(path: Path = HISTORY) -> list[Record]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise DataError(
                f"{path}, line {number} is not a valid record: {field}: {first['msg']}. "
                f"A record has {', '.join(Record.model_fields)}."
            ) from None
    return records


def select(records: list[Record], topic: str, since: date, until: date, words: list[str]) -> list[Record]:
    return [
        record
        for record in records
        if (not topic or topic in record.topics)
        and since <= record.date <= until
        and all(word.lower() in record.page().lower() for word in words)
    ]


@guarded
def history(
    words: Annotated[list[str] | None, typer.Argument(help="words in the record", show_default=False)] = None,
    *,
    topic: Annotated[str, typer.Option(help='"SFT speed", "RL speed", "FP8", "sandbox", ...; all by default')] = "",
    since: Annotated[datetime, typer.Option(help="first day", formats=DAYS)] = datetime(2026, 1, 1),
    until: Annotated[datetime, typer.Option(help="last day", formats=DAYS)] = datetime(2999, 12, 31),
    titles: Annotated[bool, typer.Option("--titles", help="print one line per record")] = False,
) -> None:
    records = read()
    topics = sorted({name for record in records for name in record.topics})
    if topic and topic not in topics:
        raise DataError(f"Unknown --topic {topic}. Choose one of: {', '.join(topics)}.")
    found = select(records, topic, since.date(), until.date(), words or [])
    if not found:
        raise DataError(f"None of the {len(records)} records matches these options. Use only --titles to list all.")
    for record in found:
        print(record.line() if titles else record.page())


if __name__ == "__main__":
    typer.run(history)
