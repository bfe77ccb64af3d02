"""Notebook habits in code that Python refused: prompts, a common indent, ``%`` and ``!`` lines.

Only code that does not parse comes here, so what valid code means cannot change. Line for line is
rewritten, so that the line numbers of a traceback stay true. Runs confined, beside the code.
"""

import ast
import builtins
import contextlib
import importlib.machinery
import re
import sys
import time
import types
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from retool_mcore.sandbox.child.imports import change_on_import
from retool_mcore.sandbox.child.programs import NOT_RUN

# What a program may want to install and may find: told when it tries to.
_PACKAGES = "numpy scipy sympy mpmath pandas matplotlib sklearn networkx gmpy2 shapely ortools z3"
_SILENT = frozenset({"matplotlib", "load_ext", "reload_ext", "autoreload", "config", "pylab"})  # nothing is to be done
_INSTALLERS = re.compile(r"(?:\S*python[\d.]*\s+-m\s+)?(?:pip3?|conda|mamba|uv|apt|apt-get)\b")
_PROMPT = re.compile(r"[ \t]*(>>>|\.\.\.)(?: |$)")
_MAGIC = re.compile(r"([ \t]*)(%%|%|!)[ \t]*([^\n]*)")
_TIMING_OPTIONS = re.compile(r"(?:-[a-z]+[ \t]*\d*[ \t]+)*")
# Strings and comments, brackets and line ends: they decide whether a line starts a statement.
_TOKEN = re.compile(
    r'("""|\'\'\')(?:[^\\]|\\(?:.|\Z))*?(?:\1|\Z)'
    r'|"(?:[^"\\\n]|\\(?:.|\Z))*"?|\'(?:[^\'\\\n]|\\(?:.|\Z))*\'?'
    r"|#[^\n]*|[()\[\]{}]|\\\n|\n",
    re.DOTALL,
)
# What a word processor or a web page makes of quotes and spaces.
_TYPOGRAPHY = str.maketrans(
    {"\u00a0": " ", "\u200b": None, "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"},
)
_LINE_MAGIC, _TIMED, _CELL_TIMED = "__line_magic__", "__timed__", "__cell_timed__"


class Rewrite(NamedTuple):
    """Python that the source may have meant, with as many lines, and what the caller should say."""

    text: str
    note: str


def rewrites(source: str) -> Iterator[Rewrite]:
    """What ``source``, which Python refused, may have meant: the likeliest first, maybe nothing.

    Takes time and memory linear in the source. Line ends become ``\\n``, as when Python reads.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    text, note = _without_prompts(source)
    plain = _without_typography(text)
    if plain != text:
        text, note = plain, note + "[typographic quotes and special spaces were read as \" ' and a space]\n"
    seen = {source}
    for dedented in _without_indent(text):
        meant = _with_calls(dedented)
        if meant not in seen:
            seen.add(meant)
            yield Rewrite(meant, note)


def _without_prompts(source: str) -> tuple[str, str]:
    """Strip the prompts of an interpreter's transcript; its other lines are output, not code."""
    lines = source.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first.lstrip().startswith(">>>"):
        return source, ""
    code: list[str] = []
    num_dropped = 0
    for line in lines:
        prompt = _PROMPT.match(line)
        code.append(line[prompt.end() :] if prompt else "")
        num_dropped += not prompt and bool(line.strip())
    note = f"[lines without a >>> prompt were taken for output and not run: {num_dropped}]\n" if num_dropped else ""
    return "\n".join(code), note


def _without_typography(text: str) -> str:
    """Replace typographic quotes and special spaces that are in no string or comment."""
    pieces: list[str] = []
    position = 0
    for token in _TOKEN.finditer(text):
        pieces += [text[position : token.start()].translate(_TYPOGRAPHY), token[0]]
        position = token.end()
    return "".join((*pieces, text[position:].translate(_TYPOGRAPHY)))


def _without_indent(text: str) -> Iterator[str]:
    """The text without the first statement's indent, in all lines or in the first one alone."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
    indent = "" if first is None else lines[first][: len(lines[first]) - len(lines[first].lstrip(" \t"))]
    if first is None or not indent:
        yield text
        return
    yield "\n".join(line.removeprefix(indent) for line in lines)
    lines[first] = lines[first].removeprefix(indent)
    yield "\n".join(lines)


def _with_calls(text: str) -> str:
    """Replace each ``%`` or ``!`` line by a call; not those within a string or an expression."""
    pieces: list[str] = []
    position = 0
    is_first = True
    while position < len(text):
        magic = _MAGIC.match(text, position)
        if magic:
            if magic[2] == "%%" and is_first and (other := _cell_magic(magic[3])) is not None:
                return "".join(pieces) + other + "\n" * text.count("\n", position)
            pieces.append(_call(magic))
            position = magic.end()
        end = _end_of_line(text, position)
        pieces.append(text[position:end])
        is_first = is_first and not magic and not text[position:end].strip()
        position = end
    return "".join(pieces)


def _end_of_line(text: str, position: int) -> int:
    """The end of the logical line at ``position``, which brackets and backslashes continue."""
    depth = 0
    for token in _TOKEN.finditer(text, position):
        kind = token[0]
        if kind == "\n" and depth == 0:
            return token.end()
        if kind in "([{":
            depth += 1
        elif kind in ")]}":
            depth = max(0, depth - 1)
    return len(text)


def _cell_magic(rest: str) -> str | None:
    """The code of a cell of another language than Python; None where the cell is Python."""
    name = rest.split(None, 1)[0] if rest.strip() else ""
    if name in ("time", "timeit", "capture", "python", "python3"):
        return None
    return f"raise SystemExit({f'[a %%{name} cell was not run: only Python is run here]'!r})"


def _call(magic: re.Match[str]) -> str:
    indent, kind, rest = magic[1], magic[2], magic[3].strip()
    name, _, arguments = rest.partition(" ")
    if kind == "%" and name in ("time", "timeit") and arguments.strip():
        options = _TIMING_OPTIONS.match(arguments.strip())
        statement = arguments.strip()[options.end() if options else 0 :]
        return f"{indent}with {_TIMED}(): {statement}"
    if kind == "%%" and name in ("time", "timeit"):
        return f"{indent}{_CELL_TIMED}()"
    if kind == "%%" and name in ("capture", "python", "python3"):
        return f"{indent}pass"
    return f"{indent}{_LINE_MAGIC}({kind!r}, {rest!r})"


def parse_cell(source: str, filename: str, *, notebook: bool) -> tuple[ast.Module, Rewrite | None]:
    """Parse a script, or a cell and, if Python refuses that, what it may have meant.

    Raises what ``ast.parse`` raises for ``source`` itself.
    """
    try:
        return ast.parse(source, filename), None
    except SyntaxError:
        for rewrite in rewrites(source) if notebook else ():
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                return ast.parse(rewrite.text, filename), rewrite
        raise


def compile_cell(tree: ast.Module, filename: str, *, echo: bool, flags: int = 0) -> list[types.CodeType]:
    """The code of a cell and, with ``echo``, that of its last expression. Raises SyntaxError."""
    last = tree.body[-1] if echo and tree.body else None
    if last is None or not (isinstance(last, ast.Expr) or _is_timed(last)):
        return [compile(tree, filename, "exec", flags, dont_inherit=True)]
    body = ast.Module(body=tree.body[:-1], type_ignores=tree.type_ignores)
    return [
        compile(body, filename, "exec", flags, dont_inherit=True),
        compile(ast.Interactive(body=[last]), filename, "single", flags, dont_inherit=True),
    ]


def compile_awaiting(tree: ast.Module, filename: str) -> list[types.CodeType]:
    """The code with top-level await allowed; nothing where that does not help."""
    with contextlib.suppress(SyntaxError):
        return compile_cell(tree, filename, echo=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return []


def _is_timed(statement: ast.stmt) -> bool:
    """Whether a statement came from a ``%time`` line, which echoes a value like any other."""
    if not isinstance(statement, ast.With):
        return False
    call = statement.items[0].context_expr
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == _TIMED


# --------------------------------------------------------------------- at run time


def provide() -> None:
    """Make what rewritten code calls known to it, without a name in its own namespace."""
    for name, function in ((_LINE_MAGIC, _line_magic), (_TIMED, _timed), (_CELL_TIMED, _cell_timed)):
        setattr(builtins, name, function)


def provide_notebook(*, has_heavy: bool) -> None:
    """Make ``display`` known, and figures shown as text once matplotlib is imported.

    ``has_heavy``: whether it can be imported in this image at all.
    """
    builtins.__dict__["display"] = display
    if has_heavy:  # the base of all backends: importing it for everyone would cost 0.3 s
        change_on_import({"matplotlib.backend_bases": _show_as_text})


def _show_as_text(backend_bases: Any) -> None:
    """A figure that is shown becomes a line of text; ``plt.show()`` closes it, as in a notebook."""
    manager_class = backend_bases.FigureManagerBase

    def show(manager: Any) -> None:
        display(manager.canvas.figure)

    def pyplot_show(_: object, **options: object) -> None:
        for manager in backend_bases.Gcf.get_all_fig_managers():
            manager.show()
            backend_bases.Gcf.destroy(manager)

    manager_class.show = show
    manager_class.pyplot_show = backend_bases._Backend.show = classmethod(pyplot_show)


def display(*values: object, **_: object) -> None:
    """Print each value as a notebook's text form shows it."""
    for value in values:
        sys.stdout.write(f"{value!r}\n")


def end_cell() -> None:
    """Tell the time of a cell that began with ``%%time``."""
    if _cell_started:
        with contextlib.suppress(Exception):  # the code may have closed its streams
            _tell_time(_cell_started.pop())


_cell_started: list[float] = []


def _cell_timed() -> None:
    _cell_started.append(time.perf_counter())


@contextlib.contextmanager
def _timed() -> Generator[None]:
    started = time.perf_counter()
    yield
    _tell_time(started)


def _tell_time(started: float) -> None:
    sys.stdout.write(f"Wall time: {1000 * (time.perf_counter() - started):.3g} ms (one run)\n")


def _line_magic(kind: str, rest: str) -> None:
    """Do what a ``%`` or ``!`` line can do here: nothing, or one line that says why not."""
    name = rest.partition(" ")[0]
    if kind == "!" or _INSTALLERS.match(rest):
        reason = _why_not_run(rest)
    elif name in _SILENT or name in ("time", "timeit"):
        return
    else:
        reason = "this notebook command is not known here"
    sys.stderr.write(f"[{kind}{rest[:100]} was not run: {reason}]\n")


def _why_not_run(command: str) -> str:
    """Why a program is not run, in words for whoever wrote ``command``."""
    if not _INSTALLERS.match(command):
        return NOT_RUN
    present = ", ".join(name for name in _PACKAGES.split() if _is_installed(name))
    return f"packages cannot be installed here; these are there: {present}"


def _is_installed(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name) is not None
