"""Lines for people: folded between words where a terminal would cut a word, whole in a log."""

import os
import re
from typing import IO

_WORDS = re.compile(r"`[^`]*`\S*|\S+")  # what stands in backticks is copied, so it stays on one line
_GAP = re.compile(r"\S {2,}(?=\S)")  # between the columns of a table
INDENT = 2


def folded(text: str, stream: IO[str]) -> str:
    """``text`` for ``stream``: lines are folded to the width of a terminal, whole anywhere else."""
    width = _width(stream)
    return "\n".join(_fold(line, width) for line in text.split("\n")) if width else text


def _width(stream: IO[str]) -> int:
    """Columns of the terminal that ``stream`` writes to, or COLUMNS; 0 where there is none."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal, or no descriptor at all
        return 0
    named = os.environ.get("COLUMNS", "")
    return int(named) if named.isdecimal() else width


def _fold(line: str, width: int) -> str:
    """Lines of at most ``width`` characters; those that follow stand under the last column of a
    table, or a little to the right.
    """
    if len(line) <= width:
        return line
    start = len(line) - len(line.lstrip())
    gaps = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= width // 2]
    indent = gaps[-1] if gaps else start + INDENT
    head, words = line[: gaps[-1] if gaps else start], _WORDS.findall(line[gaps[-1] if gaps else start :])
    lines, empty = [head], True
    for word in _short_enough(words, width - indent):
        if not empty and len(lines[-1]) + 1 + len(word) > width:
            lines.append(" " * indent)
            empty = True
        lines[-1] += word if empty else f" {word}"
        empty = False
    return "\n".join(lines)


def _short_enough(words: list[str], room: int) -> list[str]:
    """``words``, those in backticks that do not fit into a line split at their spaces."""
    return [part for word in words for part in ([word] if len(word) <= room else word.split())]
