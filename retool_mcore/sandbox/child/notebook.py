"""Repairs cells that do not parse: prompts, indentation, ``%`` and ``!`` lines, typographic quotes.

Only code that Python rejects is rewritten, so valid code never changes its meaning. Each repair
replaces one line by one line, so line numbers in tracebacks stay correct. Runs in the confined
process.
"""

import ast
import importlib.machinery
import re
import sys
import textwrap
import types
from typing import NamedTuple

from retool_mcore.sandbox.child.programs import NOT_RUN

# Packages that code often tries to install; the note lists those that are present.
_PACKAGES = "numpy scipy sympy mpmath pandas matplotlib sklearn networkx gmpy2 shapely ortools z3"
_SILENT = ("%matplotlib", "%load_ext", "%reload_ext", "%autoreload", "%config", "%%time", "%%timeit", "%%capture")
_COMMAND = re.compile(r"([ \t]*)((?:%%?|!)[ \t]*(.*))")
_INSTALLER = re.compile(r"(?:\S*python[\d.]*\s+-m\s+)?(?:pip3?|conda|mamba|uv|apt|apt-get)\b")
_PROMPT = re.compile(r"[ \t]*(>>>|\.\.\.)(?: |$)")
# Quotes and spaces as word processors and web pages write them.
_TYPOGRAPHY = str.maketrans(
    {"\u00a0": " ", "\u200b": None, "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"},
)
_MAX_REWRITES = 30  # each is followed by one more attempt to parse


class Cell(NamedTuple):
    """A parsed cell: syntax tree, source (possibly repaired), and a note to print on stderr."""

    tree: ast.Module
    text: str
    note: str = ""


def parse_cell(source: str, filename: str, *, notebook: bool) -> Cell:
    """Parse ``source``; in a notebook, retry with repairs after a SyntaxError.

    Raises what ``ast.parse`` raises for the unmodified ``source``.
    """
    try:
        return Cell(ast.parse(source, filename), source)
    except SyntaxError:
        if notebook and (cell := _repair(source, filename)):
            return cell
        raise


def _repair(source: str, filename: str) -> Cell | None:
    """Rewrite each line that Python rejects until all parse. None if a line cannot be repaired."""
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
                notes.append(f"[{command[2][:100]} was not run: {_reason_not_run(command[3])}]\n")
        elif message.startswith(("unexpected indent", "unindent does not match")):
            lines[number] = line.removeprefix(indent)
        elif message.startswith(("invalid character", "invalid non-printable")):
            lines[number] = line.translate(_TYPOGRAPHY)
            notes.append("[typographic quotes and special spaces were read as \" ' and a space]\n")
        if lines[number] == line:
            return None
    return None


def _without_prompts(lines: list[str]) -> tuple[list[str], list[str]]:
    """Strip the prompts of an interpreter transcript, and blank its other lines, the output."""
    if not next((line for line in lines if line.strip()), "").lstrip().startswith(">>>"):
        return lines, []
    prompts = [_PROMPT.match(line) for line in lines]
    code = [line[prompt.end() :] if prompt else "" for line, prompt in zip(lines, prompts, strict=True)]
    num_dropped = sum(not prompt and bool(line.strip()) for line, prompt in zip(lines, prompts, strict=True))
    note = f"[lines without a >>> prompt were taken for output and not run: {num_dropped}]\n"
    return code, [note] if num_dropped else []


def _reason_not_run(command: str) -> str:
    if not _INSTALLER.match(command):
        return NOT_RUN
    present = (name for name in _PACKAGES.split() if importlib.machinery.PathFinder.find_spec(name))
    return f"packages cannot be installed here; these are installed: {', '.join(present)}"


def compile_cell(tree: ast.Module, filename: str, *, notebook: bool) -> list[types.CodeType]:
    """Compile a script, or a notebook cell with top-level await. Raises SyntaxError.

    A trailing expression of a cell becomes a second code object, which echoes its value.
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
    """Print the ``repr`` of each value, as a notebook does in text form."""
    for value in values:
        sys.stdout.write(f"{value!r}\n")
