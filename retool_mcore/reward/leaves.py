r"""Read one expression as a SymPy tree: what an answer consists of once its form is taken apart.

Python's own parser reads Python and plain LaTeX, through an allow-list; latex2sympy2_extended, the
parser of math-verify, reads other LaTeX. All of a text is read or none of it. This runs in a
checker process: hostile expressions may take long.
"""

# SymPy has no types; what it returns is annotated here.
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

MAX_BITS = 1 << 20  # of a power that is computed; a larger one stays a power
MAX_LETTERS = 4  # side by side without a sign: `abcd` is a product, `hello` is a word


class Unreadable(ValueError):
    """A text that is not mathematics, and why."""


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
_FACTORIAL, _APPLIED = "FACTORIAL", "applied_"  # Python has no sign for a factorial, and calls only what it knows


@lru_cache(maxsize=4096)
def value(text: str) -> Expr:
    """The value of an expression. Raises Unreadable with the reason."""
    text = _MIXED.sub(_mixed, text.strip())
    python = _as_python(text)
    tree = _read_latex(text) if re.search(r"[\\{|]", python) else _read_python(python)
    if not isinstance(tree, Expr) or tree.has(sympy.nan, sympy.zoo):
        raise Unreadable("it has no value")
    return tree


def _mixed(match: re.Match[str]) -> str:
    if int(match[3]) >= int(match[4]):
        raise Unreadable("a number stands before an improper fraction, which may be a product or a sum")
    return f"({match[1]}+{match[2]})"


def _as_python(text: str) -> str:
    r"""Plain LaTeX in Python's spelling: ``\frac{x}{2}`` is ``((x)/(2))``. Other commands stay."""
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
        return _built(ast.parse(_with_products(text), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise Unreadable("it is no expression") from error


def _with_products(text: str) -> str:
    """Python's spelling of ``2x(x+1)``, ``2*x*(x+1)``, with fractions in place of decimals."""
    text = _DECIMAL.sub(r"(\1\2/1e\2)", text)
    text = re.sub(r"1e(\d+)", lambda match: str(10 ** len(match[1])), text)
    out: list[str] = []
    at, before = 0, "sign"
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise Unreadable(f"{text[at:].strip()[:12]!r} is not known")
        at, kind, token = match.end(), match.lastgroup, match[match.lastgroup]
        if before in ("function", "applied") and kind != "open":
            raise Unreadable(f"{out[-1]} has no brackets")
        if kind in ("number", "name", "applied", "open") and before in ("number", "name", "close", "factorial"):
            if kind == "number" and before != "factorial":
                raise Unreadable(f"the number {token} stands behind a value")
            out.append("*")
        if kind == "name":
            token, kind = _name(token)
        out.append({"number": token.lstrip("0") or "0", "applied": _APPLIED + token, "factorial": f"**{_FACTORIAL}",
                    "sign": token.replace("^", "**")}.get(kind, token))  # fmt: skip
        before = kind
    return "".join(out)


def _name(name: str) -> tuple[str, str]:
    """A function, a constant or letters. Small letters are a product; AB is one name, not BA."""
    if name in _FUNCTIONS:
        return name, "function"
    if name in _CONSTANTS or name in _GREEK or "_" in name or (name.isupper() and len(name) <= MAX_LETTERS):
        return name, "name"
    if len(name) > MAX_LETTERS:
        raise Unreadable(f"{name!r} is a word")
    return "*".join(name), "name"


def _built(node: ast.expr) -> Any:
    """The SymPy tree of Python's: integers, names, arithmetic and known functions, nothing else."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return Integer(number)
        case ast.Name(id=name) if name != _FACTORIAL:
            return _CONSTANTS.get(name, Symbol(name))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_built(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _built(inner)
        case ast.BinOp(op=ast.Pow(), left=left, right=ast.Name(id="FACTORIAL")):
            return sympy.factorial(_built(left))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_built(left), _built(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_built(left), _built(right))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name.startswith(_APPLIED):
            return sympy.Function(name)(*map(_built, args))
        case ast.Call(func=ast.Name(id=name), args=[_] | [_, _] as args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_built, args))
        case _:
            raise Unreadable("it is no expression")


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Div: lambda a, b: a / b,
}  # fmt: skip


def _power(base: Any, exponent: Any) -> Any:
    """A power, left as it is where its value would be huge."""
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
        raise Unreadable(f"{text[end:].strip()[:12]!r} is not known")
    try:
        return _evaluated(latex2sympy(text, normalization_config=None, conversion_config=_LATEX))
    except Exception as error:  # the parser raises plain exceptions
        raise Unreadable("it is no expression") from error


def _evaluated(tree: Any) -> Any:
    """Compute the powers, sums and functions of a tree, which latex2sympy leaves as they are."""
    if isinstance(tree, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit):
        return tree.doit()
    if tree.is_Symbol:
        return {"i": I, "e": E}.get(tree.name, tree)
    args = [_evaluated(each) for each in tree.args]
    return _power(*args) if tree.is_Pow else tree.func(*args) if args else tree
