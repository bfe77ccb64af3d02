"""The Jinja templates of reports. All values are escaped, in Markdown as well as in HTML."""

from functools import cache
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from retool_mcore.run.status import printable


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
