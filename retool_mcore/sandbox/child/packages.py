"""Imports packages into the warm images.

The light image imports part of the standard library. The full image adds the mathematics packages
and the modules in ``sandbox.preload``. Runs in the zygote, in the interpreter that runs model code.
"""

import importlib
import sys
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


class PreloadError(Exception):
    """A module in ``sandbox.preload`` cannot be part of the warm image: a configuration error."""


def heavy_packages(preload: Iterable[str]) -> frozenset[str]:
    """Return the packages whose mention in the code selects the full image."""
    return frozenset(_HEAVY.split()) | {name.partition(".")[0] for name in preload}


def import_defaults(*, light: bool) -> list[str]:
    """Import the default packages and warm them up; return those that are not installed."""
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
    """Import the modules in ``sandbox.preload`` into the full image.

    Raises PreloadError for a module that cannot be imported or that leaves a thread running. A fork
    does not copy the parent's other threads, so code that waits for one would hang.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise PreloadError(
                f"sandbox.preload: {sys.executable} cannot import {name!r}: {type(error).__name__}: {error}. "
                f"Install its package ({sys.executable} -m pip install ...), or remove it from the list."
            ) from error
        if (threads := count_threads()) > 1:
            raise PreloadError(
                f"sandbox.preload: importing {name!r} leaves {threads - 1} threads running, which a fork does not "
                "copy: executions would wait for them forever. Remove it from the list; code can still import it."
            )
    if tempfile := sys.modules.get("tempfile"):
        tempfile.__dict__["tempdir"] = None  # drop a cached value: each execution has its own directory


def _warm_up(numpy: Any, sympy: Any) -> None:
    """Call common functions once, so that children inherit filled caches and lazy imports."""
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
