"""A report as sections of texts, tables and pictures, before it is HTML or Markdown."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

MOST_CHARS = 4000  # of one turn, or of what a call printed


@dataclass(frozen=True, kw_only=True)
class Text:
    """A paragraph. ``quiet``: a remark on what stands beside it, or on what is missing."""

    text: str
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as texts; the columns from ``numbers_from`` on hold numbers and stand to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    marked: frozenset[int] = frozenset()  # rows to look at first


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
    """One number at the top: what it is, the number, and a word on it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    title: str
    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text as it was written, over lines; what is too long is cut, aloud."""

    title: str
    text: str

    @property
    def lines(self) -> str:
        """Without what a terminal or browser would act on: controls, and marks of direction."""
        text = "".join(each for each in self.text if each in "\n\t" or unicodedata.category(each)[0] != "C")
        left = len(text) - MOST_CHARS
        return f"{text[:MOST_CHARS]}\n... and {left} characters more" if left > 0 else text


Block = Text | Table | Pictures | Tiles | Code


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    title: str
    blocks: Sequence[Block]
    folded: bool = False  # in HTML, until it is clicked

    @property
    def anchor(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    subtitle: str
    sections: Sequence[ReportSection]
