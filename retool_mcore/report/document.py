"""Data model of a report: sections of texts, tables and charts; and the Jinja templates.

The templates escape all values, in Markdown as well as in HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from retool_mcore.run.status import printable


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


Block = Text | Table | Pictures | Tiles


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


@cache
def environment() -> Environment:
    """Return the Jinja2 environment: autoescape everywhere, undefined names are errors."""
    made = Environment(
        loader=PackageLoader("retool_mcore.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    cast("Any", made).filters["cell"] = cell  # Jinja2 does not type its filters
    return made


def cell(text: object) -> Markup:
    """Escape text for a Markdown table cell: no markup, newlines or column separators.

    Quotes are not escaped, to keep the Markdown source readable.
    """
    line = printable(" ".join(str(text).split()))
    safe = str(escape(line)).replace("&#34;", '"').replace("&#39;", "'")
    for mark in "\\|`*_[]":
        safe = safe.replace(mark, f"\\{mark}")
    return Markup(safe)
