"""A report as sections of texts, tables and pictures, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


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


Block = Text | Table | Pictures | Tiles


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    subtitle: str
    sections: Sequence[Section]
