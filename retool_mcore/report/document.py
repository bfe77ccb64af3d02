"""Data model of a report: sections of texts, tables and charts, independent of HTML or Markdown."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

MOST_CHARS = 4000  # of one turn, or of the output of one call


@dataclass(frozen=True, kw_only=True)
class Text:
    """A paragraph. ``quiet``: a note on the adjacent block or on missing data, shown muted."""

    text: str
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts. Columns from ``numbers_from`` on contain numbers and are right-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    marked: frozenset[int] = frozenset()  # indices of highlighted rows


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    unit: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Pictures:
    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline number: its label, its value, and a note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    title: str
    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class Code:
    """Preformatted text. Text over MOST_CHARS is truncated with a remark."""

    title: str
    text: str

    @property
    def lines(self) -> str:
        """The text without control characters and bidirectional marks, truncated to MOST_CHARS."""
        text = "".join(each for each in self.text if each in "\n\t" or unicodedata.category(each)[0] != "C")
        left = len(text) - MOST_CHARS
        return f"{text[:MOST_CHARS]}\n... and {left} characters more" if left > 0 else text


Block = Text | Table | Pictures | Tiles | Code


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    title: str
    blocks: Sequence[Block]
    folded: bool = False  # collapsed in HTML until clicked

    @property
    def anchor(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    subtitle: str
    sections: Sequence[ReportSection]
