"""Which packages the warm images hold, and how they get there.

The light image has the standard library. The full one has what mathematics needs, too, and what
``sandbox.preload`` names. Runs in the zygote, on the interpreter that the model's code gets.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LIGHT = """
abc ast bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum fractions
functools heapq io itertools json math numbers operator pprint random re statistics string textwrap threading
time traceback types typing unicodedata
"""
_FULL = """
numpy numpy.linalg numpy.random mpmath sympy sympy.core.random sympy.ntheory sympy.solvers sympy.geometry scipy
scipy.special scipy.optimize scipy.integrate scipy.interpolate scipy.linalg
"""
_HEAVY = "numpy scipy sympy mpmath pandas networkx matplotlib sklearn statsmodels numba cvxpy pulp torch"
_SHORT_LIVED_S = 1.0  # a thread that ends within this was the import's own


class PreloadError(Exception):
    """A package of ``sandbox.preload`` cannot be in the warm image; the user must change that."""


def heavy_packages(preload: Iterable[str]) -> frozenset[str]:
    """Code that names one of these is run in the full image."""
    return frozenset(_HEAVY.split()) | {name.partition(".")[0] for name in preload}


def import_defaults(*, light: bool) -> list[str]:
    """Import what an image always holds and warm up; return the packages that are not installed."""
    missing: set[str] = set()
    for name in (_LIGHT if light else _LIGHT + _FULL).split():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.add(error.name or name)
    if (numpy := sys.modules.get("numpy")) and (sympy := sys.modules.get("sympy")):
        _warm_up(numpy, sympy)
    return sorted(missing)


def import_preload(names: Sequence[str], count_threads: Callable[[], int]) -> None:
    """Import the modules that the user wants in the full image.

    Raises PreloadError for one that cannot be imported, or that leaves a thread running: a fork has
    none of its parent's threads, and what waits for one would wait for ever.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise PreloadError(
                f"sandbox.preload: {sys.executable} cannot import {name!r}: {type(error).__name__}: {error}. "
                f"Install what brings it ({sys.executable} -m pip install ...) or leave it out."
            ) from error
        give_up_at = time.monotonic() + _SHORT_LIVED_S
        while (threads := count_threads()) > 1:
            if time.monotonic() > give_up_at:
                raise PreloadError(
                    f"sandbox.preload: importing {name!r} leaves {threads - 1} threads running, which a fork does not "
                    "copy: executions would wait for them for ever. Leave it out; code can import it all the same."
                )
            time.sleep(0.01)
    if tempfile := sys.modules.get("tempfile"):
        tempfile.__dict__["tempdir"] = None  # an import may have asked for it: each execution has its own


def _warm_up(numpy: Any, sympy: Any) -> None:
    """Do once what model code often does, to fill lazy imports and caches before the fork.

    Otherwise every child would fill them again.
    """
    str(numpy.linalg.solve(numpy.eye(3) + 1, numpy.arange(3.0)))
    x, y, n = sympy.symbols("x y n")
    for value in (
        sympy.solve(2 * x**2 - 7 * x + 5, x),
        sympy.solve([x + 2 * y - 3, x - y], [x, y]),
        sympy.expand((x + 3) ** 3 * (y - 1)),
        sympy.factor(x**3 - 8),
        sympy.simplify(sympy.sin(y) ** 2 + sympy.cos(y) ** 2),
        sympy.diff(sympy.exp(y) * y**2, y),
        sympy.integrate(y**2 + 1 / y, y),
        sympy.summation(n**2, (n, 1, 10)),
        sympy.Matrix([[2, 1], [1, 3]]).det() + sympy.sqrt(12) + sympy.Rational(3, 7) + sympy.pi,
        sympy.factorint(12345),
        sympy.N(sympy.sqrt(3), 10),
    ):
        str(value)
