"""The templates of this room. Everything that they print is escaped, in Markdown as in HTML."""

from functools import cache
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from retool_mcore.run.status import printable


@cache
def environment() -> Environment:
    """Jinja2 with autoescape for every template; a name that a template lacks is an error."""
    made = Environment(
        loader=PackageLoader("retool_mcore.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    cast("Any", made).filters["cell"] = cell  # Jinja2 leaves the type of its filters open
    return made


def cell(text: object) -> Markup:
    """Text for Markdown: no markup, no new line, no end of a table's cell.

    Quotes stay as they are, since Markdown shows what a person reads in an editor, too.
    """
    line = printable(" ".join(str(text).split()))
    safe = str(escape(line)).replace("&#34;", '"').replace("&#39;", "'")
    for mark in "\\|`*_[]":
        safe = safe.replace(mark, f"\\{mark}")
    return Markup(safe)
