"""What stands in a product: numbers, names, brackets, functions and other commands."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from retool_mcore.reward.cursor import END, Cursor
from retool_mcore.reward.node import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    TRIGONOMETRIC,
    Term,
    constant_or_name,
    name,
    nary,
    number,
    put,
    size,
)
from retool_mcore.reward.points import names
from retool_mcore.reward.series import series
from retool_mcore.reward.tokens import Token, Unreadable

_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle"}
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array")
_ACCENTS = frozenset((
    r"\overline", r"\vec", r"\hat", r"\tilde", r"\dot", r"\ddot", r"\underline", r"\angle", r"\triangle"
))  # fmt: skip
_SPACES = {"\\" + letter: letter for letter in "RZNQC"}
_CLOSED = frozenset("}")
MAX_CELL = 12  # nodes
MAX_DETERMINANT = 3  # rows of one that is developed
END_TERM = Term("")
_NAME_GOES_ON = ("_", "'", "^", "(")


class Atoms(Cursor, ABC):
    """One pass over the tokens, and what stands in a product: numbers, names, brackets, commands.

    ``reader`` has the looser forms, which brackets hold in turn.
    """

    @abstractmethod
    def listing(self, *, ends: tuple[str, ...] = ()) -> Term: ...

    @abstractmethod
    def statement(self) -> Term: ...

    @abstractmethod
    def sum(self, *, units: bool = False) -> Term: ...

    @abstractmethod
    def _product(self) -> Term: ...

    @abstractmethod
    def _factor(self) -> Term: ...

    @abstractmethod
    def _exponent(self) -> Term: ...

    @abstractmethod
    def _primary(self) -> Term: ...

    def _named(self, letter: str) -> Term:
        """A symbol, with its subscript and primes as part of its name."""
        following = self.next
        if following.kind != "number" and following.text not in _NAME_GOES_ON:
            return constant_or_name(letter)
        if letter == "C" and (chosen := self._chosen()) is not None:
            return chosen
        if letter in "CPA" and self._is_pair():
            return Term("mul", (name(letter), self._primary()))  # C(10,3) is one factor
        said = letter
        if self._is_index():
            said += "_" + self._take().text  # x1, as SymPy prints x_1
        while True:
            if self._skip("_"):
                said += "_" + self._raw()
            elif self._skip("'"):
                said += "'"
            elif self._is("^") and (self._peek().text == "'" or (self._peek().text, self._peek(2).text) == ("{", "'")):
                self._take()
                said += self._raw()
            else:
                break
        if self._is("(") and (said == "f" or "'" in said or self._is_at_number()):
            self._take()
            inner = self.listing(ends=(")",))
            self._expect(")")
            return Term("call", inner.args if inner.op == "list" else (inner,), said)
        if said in CONSTANTS:
            return Term("constant", text=CONSTANTS[said])
        return name(said)

    def _is_at_number(self) -> bool:
        """Whether one number in brackets follows: ``I(0)`` is no product."""
        return self._peek().kind == "number" and self._peek(2).text == ")"

    def _is_pair(self) -> bool:
        """Whether two numbers or letters in brackets follow: ``(10, 3)``."""
        texts = [self._peek(ahead).text for ahead in range(5)]
        kinds = {self._peek(1).kind, self._peek(3).kind}
        return texts[0] + texts[2] + texts[4] == "(,)" and kinds <= {"number", "letter"}

    def _is_index(self) -> bool:
        """Whether digits glued to a letter are its index; not in ``3x2`` and ``\\frac x2``."""
        before = self._tokens[self._at - 2].text if self._at > 1 else "("
        digits = self.next.kind == "number" and self.next.text.isdigit() and self.next.glued
        return (
            digits
            and not self._is_power_in_letters()
            and before in ("(", "[", ",", "=", "+", "-", "*", ":", "<", ">", "or", "and")
        )

    def _is_power_in_letters(self) -> bool:
        """Whether a number with a letter as its power follows: ``n2^{n}`` is n times 2^n."""
        if self._peek().text != "^":
            return False
        ahead = 2
        while self._peek(ahead).kind == "number" or self._peek(ahead).text in ("{", "(", "-"):
            ahead += 1
        return self._peek(ahead).kind == "letter"

    def _chosen(self) -> Term | None:
        """``C_{10}^3``, as the Chinese write a binomial; None where C is a name with an index."""
        start = self._at
        try:
            if self._skip("_"):
                over = self._group()
                if self._skip("^"):
                    under = self._group()
                    if not over.op == under.op == "number" or over.value >= under.value:
                        return Term("binomial", (over, under))
        except Unreadable:
            pass
        self._at = start
        return None

    def _raw(self) -> str:
        """The text of a group or token, without spaces and braces: the name of a subscript."""
        if not self._skip("{"):
            return self._take().text
        said, depth = "", 1
        while self.next is not END:
            token = self._take()
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            if depth == 0:
                return said
            said += token.text.lstrip("\\").replace(" ", "") if token.text not in "{}" else ""
        raise Unreadable("a subscript has no end")

    def _group(self) -> Term:
        """An argument: what stands in braces, or one digit or letter, as LaTeX takes it."""
        if self._skip("{"):
            if (leaf := self._leaf(_CLOSED)) is not None:
                self._at += 1
                return leaf
            node = self.listing(ends=("}",))
            self._expect("}")
            return node
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self._tokens[self._at] = Token("number", token.text[1:], True)
            return number(token.text[0])
        return self._primary()

    def _enclosed(self, opening: str) -> Term:
        if opening == "{":
            node = self.listing(ends=("}",))
            self._expect("}")
            return Term("group", (node,)) if node.op in ("div", "binomial") else node
        if opening == "|":
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("|")
            return Term("abs", (node,))
        if opening not in "([" or not opening:
            raise Unreadable(f"{opening!r} has no place in it as mathematics" if opening else "it breaks off")
        bars, self._bars = self._bars, 0
        node = self.listing(ends=(")", "]"))
        self._bars = bars
        closing = self._take().text
        if closing not in (")", "]"):
            raise Unreadable(f"{opening!r} is never closed")
        if node.op == "list":
            stated = node.text in ("and", "or") and all(each.op in ("relation", "list") for each in node.args)
            return node if stated else Term("tuple", node.args, opening + closing)
        if (opening, closing) not in (("(", ")"), ("[", "]")):
            raise Unreadable(f"{opening!r} is closed by {closing!r}")
        return Term("group", (node,)) if node.op not in ("relation",) else node

    def _command(self, command: str) -> Term:
        forms: dict[str, Callable[[], Term]] = {
            r"\frac": lambda: Term("div", (self._group(), self._group())),
            r"\binom": lambda: Term("binomial", (self._group(), self._group())),
            r"\sqrt": self._root,
            r"\{": self._set,
            r"\emptyset": lambda: Term("set"),
            r"\begin": self._matrix,
            r"\boxed": self._group,
            r"\sum": lambda: self._series("add"),
            r"\prod": lambda: self._series("mul"),
        }
        if command in forms:
            return forms[command]()
        if command in (r"\lfloor", r"\lceil", r"\langle"):
            return self._pair(command)
        if command == r"\overline" and (conjugate := self._conjugate()) is not None:
            return conjugate
        if command in _ACCENTS:
            said = command + self._raw()
            while command in (r"\angle", r"\triangle") and self.next.kind == "letter" and self.next.glued:
                said += self._take().text
            return self._named(said)
        if command in FUNCTIONS:
            return self._function(command[1:])
        if command in CONSTANTS:
            return Term("constant", text=CONSTANTS[command])
        if self._is("(") and (command == r"\Gamma" or (command == r"\zeta" and self._is_at_number())):
            return Term("function", (self._primary(),), command[1:])
        if command in GREEK:
            return self._named(command)
        if command in _SPACES and self._is("_"):
            return self._named(_SPACES[command])  # \mathbb{Z}_6
        if command in _SPACES:
            return Term("space", text=_SPACES[command])
        if command == r"\mp" or not command.strip("\\"):
            raise Unreadable("it breaks off")
        raise Unreadable(f"{command} is not known to the reward")

    def _conjugate(self) -> Term | None:
        r"""``\overline{3+4i}`` with the other sign of i; None where no sum with i stands there."""
        end, held = 1, set[str]()
        while self._is("{") and self._peek(end).text not in ("}", "{", ""):
            held.add(self._peek(end).text)
            end += 1
        if "i" not in held or not held & {"+", "-"}:
            return None
        imaginary = Term("constant", text="i")
        return Term("group", (put(self._group(), imaginary, Term("neg", (imaginary,))),))

    def _series(self, op: str) -> Term:
        ends = {sign: self._group() for sign in ("_", "^", "_") if self._skip(sign)}
        return series(op, ends.get("_", END_TERM), ends.get("^", END_TERM), self._product())

    def _pair(self, command: str) -> Term:
        node = self.listing(ends=(_CLOSING[command],))
        self._expect(_CLOSING[command])
        if command == r"\langle":
            return Term("tuple", node.args if node.op == "list" else (node,), "()")
        return Term(command[2:], (node,))

    def _root(self) -> Term:
        degree = number(2)
        if self._skip("["):
            degree = self.sum()
            self._expect("]")
        inner = self._primary() if not self._is("{") else self._group()
        return Term("root", (inner, degree))

    def _set(self) -> Term:
        if self._skip(r"\}"):
            return Term("set")
        bars, self._bars = self._bars, 1
        first = self.listing(ends=(r"\}",))
        self._bars = bars
        if self._skip("|", r"\mid", r"\vert"):
            condition = self.listing(ends=(r"\}",))
            self._expect(r"\}")
            return Term("builder", (first, condition))
        self._expect(r"\}")
        if first.op == "relation" and first.text.split()[-1] == ":":
            raise Unreadable("a set's condition could not be read")
        if first.op == "relation" and ":" in first.text.split():
            return _colon_builder(first)
        if first.op == "list" and first.args[0].op == "relation" and ":" in first.args[0].text.split():
            element, condition = _colon_builder(first.args[0]).args
            return Term("builder", (element, Term("list", (condition, *first.args[1:]), first.text)))
        return Term("set", first.args if first.op == "list" else (first,))

    def _function(self, function: str) -> Term:
        """A function with its power, base and argument: ``\\sin^2 x``, ``\\log_{3} 4``."""
        power = base = None
        while self._is("^", "_"):
            if self._take().text == "_":
                base = self._group()
            else:
                power = self._exponent()
        if self._is("(", "{", "["):
            node = self._primary()
        else:
            parts = [self._factor()]
            while self.next.kind in ("number", "letter") or self._is(*GREEK, r"\pi", r"\frac", r"\sqrt"):
                parts.append(self._factor())
            if function in TRIGONOMETRIC and len(parts) == 1 and parts[0].op == "number" and self._is("("):
                parts += self._angle()
            node = nary("mul", parts)
        node = node.args[0] if node.op == "group" else node
        inverse = power is not None and power == Term("neg", (number(1),)) and "arc" + function in FUNCTIONS
        args = node.args if node.op in ("tuple", "list") else (node,)
        if function == "abs" and len(args) == 1 and base is None:
            return Term("abs", args) if power is None else Term("pow", (Term("abs", args), power))
        node = Term("function", args if base is None else (*args, base), function + ("_" if base is not None else ""))
        if power is None:
            return node
        if inverse or power == Term("neg", (number(1),)):
            return Term("function", node.args, "arc" + function)
        return Term("pow", (node, power))

    def _angle(self) -> list[Term]:
        """``(x+a)`` in ``\\sin 2(x+a)``; nothing where the brackets hold no letter."""
        start = self._at
        inner = self._factor()
        if names(inner):
            return [inner]
        self._at = start
        return []

    def _matrix(self) -> Term:
        kind = self._raw()
        if kind == "cases":
            return self._equations()
        if kind not in _MATRICES:
            raise Unreadable(f"an environment {kind!r:.40} is not known to the reward")
        if kind == "array":
            self._raw()
        rows: list[list[Term]] = [[]]
        while not self._is(r"\end"):
            if self._skip("\\\\"):
                rows.append([])
            elif not self._skip("&", r"\hline"):
                rows[-1].append(self.statement())
        self._take()
        self._raw()
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("the rows of a matrix are not of one length")
        if kind == "vmatrix" and len(rows) == len(rows[0]) <= MAX_DETERMINANT and not any(map(_has_form, rows)):
            return Term("group", (_determinant(rows),))
        determinant = "determinant" if kind in ("vmatrix", "Vmatrix") else "matrix"
        return Term("matrix", tuple(each for row in rows for each in row), f"{determinant} {len(rows)}")

    def _equations(self) -> Term:
        """The equations of ``cases``, one a row, as a list. Values with conditions are not read."""
        rows: list[Term] = []
        while not self._is(r"\end"):
            if not self._skip("\\\\", ",", ";"):
                row = self.statement()
                if row.op != "relation" or self.next.text not in ("\\\\", ",", ";", r"\end"):
                    raise Unreadable("a case has a condition, which is not known to the reward")
                rows.append(row)
        self._take()
        self._raw()
        return nary("list", rows)


def _has_form(row: list[Term]) -> bool:
    """Whether one is no value, or so large that a determinant in a determinant may be in it."""
    said = ("relation", "list", "tuple", "matrix", "set", "unit", "percent")
    return any(each.op in said or size(each) > MAX_CELL for each in row)


def _determinant(rows: list[list[Term]]) -> Term:
    """The value of a determinant, developed by its first row."""
    if len(rows) == 1:
        return rows[0][0]
    parts: list[Term] = []
    for at, each in enumerate(rows[0]):
        part = Term("mul", (each, _determinant([row[:at] + row[at + 1 :] for row in rows[1:]])))
        parts.append(Term("neg", (part,)) if at % 2 else part)
    return nary("add", parts)


def _colon_builder(relation: Term) -> Term:
    signs = relation.text.split()
    cut = signs.index(":")
    left = Term("relation", relation.args[: cut + 1], " ".join(signs[:cut])) if cut else relation.args[0]
    right = Term("relation", relation.args[cut + 1 :], " ".join(signs[cut + 1 :]))
    return Term("builder", (left, right))
