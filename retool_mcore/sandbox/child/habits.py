"""Notebook habits in code that Python refused: prompts, indents, ``%`` and ``!``, typography.

Only code that does not parse comes here, so what valid code means cannot change. Line for line is
rewritten, so that the line numbers of a traceback stay true. Runs confined, with the code.
"""

import ast
import importlib.machinery
import re
import sys
import textwrap
import types
from typing import NamedTuple

from retool_mcore.sandbox.child.programs import NOT_RUN

# What a program may want to install and may find.
_PACKAGES = "numpy scipy sympy mpmath pandas matplotlib sklearn networkx gmpy2 shapely ortools z3"
_SILENT = ("%matplotlib", "%load_ext", "%reload_ext", "%autoreload", "%config", "%%time", "%%timeit", "%%capture")
_COMMAND = re.compile(r"([ \t]*)((?:%%?|!)[ \t]*(.*))")
_INSTALLER = re.compile(r"(?:\S*python[\d.]*\s+-m\s+)?(?:pip3?|conda|mamba|uv|apt|apt-get)\b")
_PROMPT = re.compile(r"[ \t]*(>>>|\.\.\.)(?: |$)")
# What a word processor or a web page makes of quotes and spaces.
_TYPOGRAPHY = str.maketrans(
    {"\u00a0": " ", "\u200b": None, "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"},
)
_MAX_REWRITES = 30  # each is followed by one more attempt to parse


class Cell(NamedTuple):
    """A cell that parses: as it was written, or as it was read, and what the caller should say."""

    tree: ast.Module
    text: str
    note: str = ""


def parse_cell(source: str, filename: str, *, notebook: bool) -> Cell:
    """Parse a script, or a cell and, if Python refuses that, what it may have meant.

    Raises what ``ast.parse`` raises for ``source`` itself.
    """
    try:
        return Cell(ast.parse(source, filename), source)
    except SyntaxError:
        if notebook and (cell := _read_again(source, filename)):
            return cell
        raise


def _read_again(source: str, filename: str) -> Cell | None:
    """Rewrite the line that Python refuses until it refuses none, or one that is no known habit."""
    lines, notes = _without_prompts(textwrap.dedent(source.replace("\r\n", "\n")).split("\n"))
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    indent = first[: len(first) - len(first.lstrip())]
    for _ in range(_MAX_REWRITES):
        text = "\n".join(lines)
        try:
            return Cell(ast.parse(text, filename), text, "".join(dict.fromkeys(notes)))
        except SyntaxError as error:
            number = min(error.lineno or 1, len(lines)) - 1
            line, message = lines[number], error.msg
        except (ValueError, RecursionError, MemoryError):
            return None
        if command := _COMMAND.match(line):
            lines[number] = f"{command[1]}pass"
            if command[2].split()[0] not in _SILENT:
                notes.append(f"[{command[2][:100]} was not run: {_why_not(command[3])}]\n")
        elif message.startswith(("unexpected indent", "unindent does not match")):
            lines[number] = line.removeprefix(indent)
        elif message.startswith(("invalid character", "invalid non-printable")):
            lines[number] = line.translate(_TYPOGRAPHY)
            notes.append("[typographic quotes and special spaces were read as \" ' and a space]\n")
        if lines[number] == line:
            return None
    return None


def _without_prompts(lines: list[str]) -> tuple[list[str], list[str]]:
    """Strip the prompts of an interpreter's transcript; its other lines are output, not code."""
    if not next((line for line in lines if line.strip()), "").lstrip().startswith(">>>"):
        return lines, []
    prompts = [_PROMPT.match(line) for line in lines]
    code = [line[prompt.end() :] if prompt else "" for line, prompt in zip(lines, prompts, strict=True)]
    num_dropped = sum(not prompt and bool(line.strip()) for line, prompt in zip(lines, prompts, strict=True))
    note = f"[lines without a >>> prompt were taken for output and not run: {num_dropped}]\n"
    return code, [note] if num_dropped else []


def _why_not(command: str) -> str:
    if not _INSTALLER.match(command):
        return NOT_RUN
    present = (name for name in _PACKAGES.split() if importlib.machinery.PathFinder.find_spec(name))
    return f"packages cannot be installed here; these are there: {', '.join(present)}"


def compile_cell(tree: ast.Module, filename: str, *, notebook: bool) -> list[types.CodeType]:
    """The code; in a notebook with top-level await, and apart from it that of a last expression.

    Raises SyntaxError.
    """
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if notebook else 0
    if not (notebook and tree.body and isinstance(tree.body[-1], ast.Expr)):
        return [compile(tree, filename, "exec", flags, dont_inherit=True)]
    body = ast.Module(body=tree.body[:-1], type_ignores=tree.type_ignores)
    return [
        compile(body, filename, "exec", flags, dont_inherit=True),
        compile(ast.Interactive(body=tree.body[-1:]), filename, "single", flags, dont_inherit=True),
    ]


def display(*values: object, **_: object) -> None:
    """Print each value as a notebook's text form shows it."""
    for value in values:
        sys.stdout.write(f"{value!r}\n")
