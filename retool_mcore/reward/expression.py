r"""Parses one expression, a leaf of a parsed answer, into a SymPy tree.

Python's own parser reads Python and plain LaTeX, restricted to an allow-list of nodes.
latex2sympy2_extended, the parser of math-verify, reads other LaTeX. Both parse the whole text or
fail. This runs in a checker process, because a hostile expression may take long.
"""

# SymPy has no type hints, so its results are annotated here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import E, Expr, I, Integer, Symbol, oo, pi

MAX_BITS = 1 << 20  # larger powers stay symbolic
MAX_LETTERS = 4  # adjacent letters up to this many are a product (`abcd`); more are a word (`hello`)


class Unreadable(ValueError):
    """The text is not a mathematical expression. The message says why."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": sympy.sqrt, "cbrt": sympy.cbrt, "exp": sympy.exp, "log": sympy.log, "ln": sympy.log, "sin": sympy.sin,
    "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc, "asin": sympy.asin,
    "acos": sympy.acos, "atan": sympy.atan, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
    "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "abs": sympy.Abs, "Abs": sympy.Abs, "gcd": sympy.gcd,
    "factorial": sympy.factorial, "binomial": sympy.binomial, "floor": sympy.floor, "ceiling": sympy.ceiling,
    "Rational": lambda a, b=1: a / b,
}  # fmt: skip
_CONSTANTS = {"pi": pi, "e": E, "E": E, "i": I, "I": I, "oo": oo, "infty": oo}
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi",
    "Omega", "ell",
)  # fmt: skip
_COMMANDS = {name: name for name in (*_GREEK, "pi", "infty")} | {"cdot": "*", "times": "*", "div": "/", "ast": "*"}
_FRACTION = re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}")
_SQRT = re.compile(r"\\sqrt ?(?:\{([^{}]*)\}|(?=\())")
_ROOT = re.compile(r"\\sqrt ?\[ ?(\w+) ?\] ?\{([^{}]*)\}")
_POWER = re.compile(r"(?:\^|\*\*) ?\{([^{}]*)\}")
_GROUP = re.compile(r"(?<![a-zA-Z_}\]])\{([^{}]*)\}")
_INDEX = re.compile(r"(?<![A-Za-z\d])(\\?[A-Za-z]+) ?_ ?(?:(\w)(?!\w)|\{ ?(\w+) ?\})")
_COMMAND = re.compile(r"\\([a-zA-Z]+) ?")
_DEGREES = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?\^ ?\{? ?\\circ ?\}?")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_MIXED = re.compile(r"(?<![\w.}^_])(\d+) ?(\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\})")
_TOKEN = re.compile(
    r" *(?:(?P<number>\d+)|(?P<applied>[fFP](?= *\()|[A-Za-z](?= *\( *\d+ *\)))|(?P<name>[A-Za-z]+(?:_\w+)?)"
    r"|(?P<open>\()|(?P<close>\))|(?P<factorial>!)|(?P<sign>\*\*|[-+*/^,]))"
)
_LATEX_TOKENS = re.compile(
    r"(?:\\(?:frac|sqrt|cdot|times|pi|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|binom|exp|sum"
    rf"|prod|int|lim|to|infty|lceil|rceil|lfloor|rfloor|max|min|gcd|det|overline|{'|'.join(_GREEK)})(?![a-zA-Z])"
    r"|\d+(?! \d)|(?<![A-Za-z])[A-Za-z]{1,4}(?![A-Za-z\d])|[-+*/^_(){}\[\],|!=]| )++"
)
_LATEX = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
_FACTORIAL, _APPLIED = (
    "FACTORIAL",
    "applied_",
)  # placeholders: Python has no factorial operator, and f(x) needs a known f


@lru_cache(maxsize=4096)
def value(text: str) -> Expr:
    """Parse an expression into a SymPy tree. Raises Unreadable with the reason."""
    text = _MIXED.sub(_mixed, text.strip())
    python = _as_python(text)
    tree = _read_latex(text) if re.search(r"[\\{|]", python) else _read_python(python)
    if not isinstance(tree, Expr) or tree.has(sympy.nan, sympy.zoo):
        raise Unreadable("it has no value")
    return tree


def _mixed(match: re.Match[str]) -> str:
    if int(match[3]) >= int(match[4]):
        raise Unreadable("a number before an improper fraction may be a product or a sum")
    return f"({match[1]}+{match[2]})"


def _as_python(text: str) -> str:
    r"""Translate plain LaTeX to Python, ``\frac{x}{2}`` to ``((x)/(2))``. Other commands stay."""
    text = _DEGREES.sub(r"(\1*pi/180)", text)
    text = _INDEX.sub(lambda match: f" {match[1]}_{match[2] or match[3]} ", text)
    before = ""
    while text != before:
        before = text
        text = _FRACTION.sub(r"((\1)/(\2))", text)
        text = _SQRT.sub(lambda match: f" sqrt({match[1]})" if match[1] is not None else " sqrt", text)
        text = _ROOT.sub(r"(\2)**(1/(\1))", text)
        text = _GROUP.sub(r"(\1)", _POWER.sub(r"**(\1)", text))
    return _COMMAND.sub(lambda match: f" {_COMMANDS[match[1]]} " if match[1] in _COMMANDS else match[0], text)


def _read_python(text: str) -> Any:
    try:
        return _build(ast.parse(_insert_products(text), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise Unreadable("it is not an expression") from error


def _insert_products(text: str) -> str:
    """Make products explicit, ``2x(x+1)`` to ``2*x*(x+1)``, and write decimals as fractions."""
    text = _DECIMAL.sub(r"(\1\2/1e\2)", text)
    text = re.sub(r"1e(\d+)", lambda match: str(10 ** len(match[1])), text)
    out: list[str] = []
    at, before = 0, "sign"
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise Unreadable(f"{text[at:].strip()[:12]!r} is not supported")
        at, kind, token = match.end(), match.lastgroup, match[match.lastgroup]
        if before in ("function", "applied") and kind != "open":
            raise Unreadable(f"{out[-1]} has no parentheses")
        if kind in ("number", "name", "applied", "open") and before in ("number", "name", "close", "factorial"):
            if kind == "number" and before != "factorial":
                raise Unreadable(f"the number {token} follows a value")
            out.append("*")
        if kind == "name":
            token, kind = _name(token)
        out.append({"number": token.lstrip("0") or "0", "applied": _APPLIED + token, "factorial": f"**{_FACTORIAL}",
                    "sign": token.replace("^", "**")}.get(kind, token))  # fmt: skip
        before = kind
    return "".join(out)


def _name(name: str) -> tuple[str, str]:
    """Read a name as a function, a constant or letters. ``ab`` is a product; ``AB`` is one name."""
    if name in _FUNCTIONS:
        return name, "function"
    if name in _CONSTANTS or name in _GREEK or "_" in name or (name.isupper() and len(name) <= MAX_LETTERS):
        return name, "name"
    if len(name) > MAX_LETTERS:
        raise Unreadable(f"{name!r} is a word")
    return "*".join(name), "name"


def _build(node: ast.expr) -> Any:
    """Convert Python's tree to SymPy's. Allows integers, names, arithmetic and known functions."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return Integer(number)
        case ast.Name(id=name) if name != _FACTORIAL:
            return _CONSTANTS.get(name, Symbol(name))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_build(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _build(inner)
        case ast.BinOp(op=ast.Pow(), left=left, right=ast.Name(id="FACTORIAL")):
            return sympy.factorial(_build(left))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_build(left), _build(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name.startswith(_APPLIED):
            return sympy.Function(name)(*map(_build, args))
        case ast.Call(func=ast.Name(id=name), args=[_] | [_, _] as args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_build, args))
        case _:
            raise Unreadable("it is not an expression")


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Div: lambda a, b: a / b,
}  # fmt: skip


def _power(base: Any, exponent: Any) -> Any:
    """Compute a power; leave it symbolic if its value would be huge."""
    if base.is_Rational and exponent.is_Integer:
        bits = max(base.p.bit_length(), base.q.bit_length()) * abs(int(exponent))
        return sympy.Pow(base, exponent, evaluate=bits < MAX_BITS)
    return base**exponent


def _read_latex(text: str) -> Any:
    text = _DECIMAL.sub(lambda match: rf"{{\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}}}}", text)
    text = re.sub(r"_ ?(\d)(?!\d)", r"_{\1}", _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text))
    known = _LATEX_TOKENS.match(text)
    end = known.end() if known else 0
    if end < len(text):
        raise Unreadable(f"{text[end:].strip()[:12]!r} is not supported")
    try:
        return _evaluate(latex2sympy(text, normalization_config=None, conversion_config=_LATEX))
    except Exception as error:  # the parser raises plain exceptions
        raise Unreadable("it is not an expression") from error


def _evaluate(tree: Any) -> Any:
    """Evaluate powers, sums and functions, which latex2sympy leaves unevaluated."""
    if isinstance(tree, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit):
        return tree.doit()
    if tree.is_Symbol:
        return {"i": I, "e": E}.get(tree.name, tree)
    args = [_evaluate(each) for each in tree.args]
    return _power(*args) if tree.is_Pow else tree.func(*args) if args else tree
