r"""Read an answer as mathematics, whole or not at all.

``read`` gives a tree of ``Node``. There is no recovery: a text of which one token has no place is
Unreadable, so no number inside it can stand for the whole. The grammar, from loose to tight: lists
(``,`` ``;`` and "or"), relations, unions, sums, products with or without a sign, powers.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from retool_mcore.reward.node import CONSTANTS, FUNCTIONS, GREEK, MAX_DEPTH, MAX_TREE_DEPTH, Node, name, number
from retool_mcore.reward.tokens import Token, Unreadable, tokens
from retool_mcore.reward.units import SCALES, unit_at

RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv", r"\to", ":", r"\parallel", r"\perp",
             r"\notin", r"\sim", r"\cong", r"\subset", r"\subseteq", r"\propto")  # fmt: skip
_SETS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "without"}
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle"}
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array")
_END = Token("sign", "")


def read(text: str) -> Node:
    """The tree of a whole answer. Raises Unreadable, which says what has no place in it."""
    reader = _Reader(tokens(text))
    node = reader.listing()
    if reader.next is not _END:
        raise Unreadable(f"{reader.next.text!r} has no place in it as mathematics")
    if _too_deep(node):
        raise Unreadable("it is nested too deeply")
    return node


class _Reader:
    """One pass over the tokens, by recursive descent."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._at = 0
        self._depth = 0
        self._bars = 0  # open absolute values: a bar closes one instead of opening another

    @property
    def next(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _peek(self, ahead: int = 1) -> Token:
        return self._tokens[self._at + ahead] if self._at + ahead < len(self._tokens) else _END

    def _take(self) -> Token:
        token = self.next
        self._at += 1
        return token

    def _skip(self, *texts: str) -> bool:
        """Take the next token if it is one of these signs or commands."""
        if self.next.kind in ("sign", "command") and self.next.text in texts:
            self._at += 1
            return True
        return False

    def _is(self, *texts: str) -> bool:
        return self.next.kind in ("sign", "command") and self.next.text in texts

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise Unreadable(f"{text!r} is missing before {self.next.text!r}")

    def listing(self, *, ends: tuple[str, ...] = ()) -> Node:
        """Statements between commas; a single one stands for itself."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        parts = [self.statement()]
        words: set[str] = set()
        while not self._is(*ends) and (word := self._separator()):
            words.add(word)
            if self.next is _END or self._is(*ends):
                break
            parts.append(self.statement())
        self._depth -= 1
        if len(parts) == 1:
            return parts[0]
        return Node("list", tuple(parts), "and" if "and" in words else "or" if "or" in words else "")

    def _separator(self) -> str:
        found = ""
        while True:
            token = self.next
            word = token.text.lower().strip(" ,") if token.kind in ("text", "word") else token.text
            if token.kind in ("text", "word") and word in ("or", "and", ""):
                found = word or found or ","
            elif token.kind in ("command", "sign") and word in (",", ";", r"\vee", r"\wedge", "&"):
                found = {r"\vee": "or", r"\wedge": "and"}.get(word, found or ",")
            else:
                return found
            self._at += 1

    def statement(self) -> Node:
        first = self._sets()
        if not self._is(*RELATIONS):
            return first
        sides, signs = [first], list[str]()
        while self._is(*RELATIONS):
            signs.append(self._take().text)
            sides.append(self._sets())
        return Node("relation", tuple(sides), " ".join(signs))

    def _sets(self) -> Node:
        node = self.sum(units=True)
        while self._is(*_SETS):
            op = _SETS[self._take().text]
            node = Node(op, (node, self.sum(units=True)))
        return node

    def sum(self, *, units: bool = False) -> Node:
        """A sum, with a percent sign or a unit behind it where ``units`` may stand."""
        negative = False
        sign = ""
        while self._is("+", "-", r"\pm", r"\mp"):
            token = self._take().text
            negative ^= token == "-"
            sign = token if token.startswith("\\") else sign
        node = self._product()
        node = Node("neg", (node,)) if negative else node
        node = Node("pm", (number(0), node), sign) if sign else node
        parts = [node]
        while self._is("+", "-", r"\pm", r"\mp"):
            op = self._take().text
            right = self._product()
            if op.startswith("\\"):
                parts = [Node("pm", (_nary("add", parts), right), op)]
            else:
                parts.append(right if op == "+" else Node("neg", (right,)))
        node = _nary("add", parts)
        if self._is(r"\bmod", r"\pmod"):
            self._take()
            braced = self._skip("(") or self._skip("{")
            node = Node("mod", (node, self.sum()))
            if braced and not (self._skip(")") or self._skip("}")):
                raise Unreadable("the modulus has no end")
        return self._unit(node) if units else node

    def _unit(self, node: Node) -> Node:
        while self.next.kind in ("word", "text"):
            word, _, rest = self.next.text.partition(" ")
            if word.lower() not in SCALES:
                break
            node = Node("mul", (node, number(SCALES[word.lower()])))
            self._at += not rest
            if rest:
                self._tokens[self._at] = Token(self.next.kind, rest)
        if self._skip(r"\%"):
            return Node("percent", (node,))
        unit, self._at = unit_at(self._tokens, self._at)
        return Node("unit", (node,), unit) if unit is not None else node

    def _product(self) -> Node:
        parts = [self._factor()]
        while True:
            if self._is("*", "/"):
                if unit_at(self._tokens, self._at + 1)[0] is not None:
                    self._at += self._is("*")
                    return _nary("mul", parts)
                if self._take().text == "*":
                    parts.append(self._factor())
                else:
                    parts = [Node("div", (_nary("mul", parts), self._factor()))]
            elif self._starts_factor():
                self._juxtapose(parts)
            else:
                return _nary("mul", parts)

    def _juxtapose(self, parts: list[Node]) -> None:
        """A product without a sign; a whole number before a proper fraction is a mixed number."""
        last = parts[-1]
        whole = last.args[0] if last.op == "neg" else last
        is_fraction, beside = self._is(r"\frac"), whole.op == "number" and self.next.kind == "number"
        right = self._factor()
        if whole.op == "number" and whole.text.isdigit() and len(parts) == 1:
            if beside and right.op == "number" and self._is("/") and self._peek().kind == "number":
                self._take()
                right, beside = Node("div", (right, self._factor())), False
                is_fraction = _proper(right)
                beside = not is_fraction
            if is_fraction and _proper(right):
                mixed = Node("group", (Node("add", (whole, right)),))
                parts[-1] = mixed if last is whole else Node("neg", (mixed,))
                return
        if beside:
            raise Unreadable("two numbers stand side by side")
        parts.append(right)

    def _starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)
        return token.kind == "command" and (
            token.text in FUNCTIONS
            or token.text in CONSTANTS
            or token.text in GREEK
            or token.text
            in (
                r"\frac",
                r"\sqrt",
                r"\binom",
                r"\lfloor",
                r"\lceil",
                r"\begin",
                r"\overline",
                r"\vec",
                r"\hat",
                r"\angle",
                r"\triangle",
                r"\nabla",
                r"\partial",
                r"\tilde",
                r"\underline",
                r"\{",
                r"\boxed",
            )  # fmt: skip
        )

    def _factor(self) -> Node:
        negative = False
        while self._is("+", "-"):
            negative ^= self._take().text == "-"
        node = self._postfix(self._primary())
        while self._skip("^"):
            if self._is(r"\degree", r"\circ") or (self._is("{") and self._peek().text in (r"\circ", r"\degree")):
                braced = self._skip("{")
                self._take()
                if braced:
                    self._expect("}")
                node = Node("degree", (node,))
            elif self._is("'", r"\top") or (self._is("{") and self._peek().text == "'"):
                raise Unreadable("a prime stands where a power is due")
            else:
                node = Node("pow", (node, self._exponent()))
            node = self._postfix(node)
        return Node("neg", (node,)) if negative else node

    def _exponent(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        if self._is("-", "+"):
            negative = self._take().text == "-"
            node = self._postfix(self._primary())
            node = Node("neg", (node,)) if negative else node
        else:
            node = self._primary()
        if not self._is("}") and self._is("^"):
            self._take()
            node = Node("pow", (node, self._exponent()))
        self._depth -= 1
        return node

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._skip("!"):
                node = Node("factorial", (node,))
            elif self._skip(r"\degree"):
                node = Node("degree", (node,))
            elif node.op == "number" and self._is("_"):
                node = self._based(node)
            else:
                return node

    def _based(self, node: Node) -> Node:
        """``1011_2``: digits in a base."""
        self._take()
        braced = self._skip("{")
        while braced and (self._skip("(") or self._skip(")")):
            pass
        token = self._take()
        if token.kind != "number" or not token.text.isdigit() or not 2 <= int(token.text[:3]) <= 36:
            raise Unreadable("the base of a number is no number from 2 to 36")
        if braced:
            self._skip(")")
            self._expect("}")
        if not node.text.isdigit() or any(int(digit) >= int(token.text) for digit in node.text):
            raise Unreadable(f"{node.text!r:.40} is no number of base {token.text}")
        return number(int(node.text, int(token.text)))

    def _primary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        node = self._read_primary()
        self._depth -= 1
        return node

    def _read_primary(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._decimal(token)
        if token.kind == "letter":
            return self._named(token.text)
        if token.kind == "sign":
            return self._enclosed(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.kind == "text" and token.text and (self._is("=", "_") or self._at > 1):
            raise Unreadable(f"the words {token.text!r:.60} stand inside it")
        raise Unreadable(f"the words {token.text!r:.60} are no mathematics" if token.text else "it breaks off")

    def _decimal(self, token: Token) -> Node:
        """A number, with its repeating digits if it has any: ``0.1\\overline{6}``."""
        if self._is(r"\overline", r"\dot") and "." in token.text and self._peek(2).kind == "number":
            self._take()
            self._expect("{")
            digits = self._take().text
            self._expect("}")
            if digits.isdigit() and len(digits) < 100:
                places = len(token.text.partition(".")[2])
                tail = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
                return Node("number", value=Fraction(token.text.rstrip(".")) + tail)
        return number(token.text)

    def _named(self, letter: str) -> Node:
        """A symbol, with its subscript and primes as part of its name."""
        said = letter
        while self.next.kind == "sign" and self.next.text in ("_", "'"):
            if self._take().text == "'":
                said += "'"
                continue
            said += "_" + self._raw()
        if said == "f" and self._is("("):
            self._take()
            inner = self.listing(ends=(")",))
            self._expect(")")
            return Node("call", inner.args if inner.op == "list" else (inner,), said)
        if said in CONSTANTS:
            return Node("constant", text=CONSTANTS[said])
        return name(said)

    def _raw(self) -> str:
        """The text of a group or token, without spaces and braces: the name of a subscript."""
        if not self._skip("{"):
            return self._take().text
        said, depth = "", 1
        while self.next is not _END:
            token = self._take()
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            if depth == 0:
                return said
            said += token.text.lstrip("\\").replace(" ", "") if token.text not in "{}" else ""
        raise Unreadable("a subscript has no end")

    def _group(self) -> Node:
        """An argument: what stands in braces, or one digit or letter, as LaTeX takes it."""
        if self._skip("{"):
            node = self.listing(ends=("}",))
            self._expect("}")
            return node
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self._tokens[self._at] = Token("number", token.text[1:], True)
            return number(token.text[0])
        return self._primary()

    def _enclosed(self, opening: str) -> Node:
        if opening == "{":
            node = self.listing(ends=("}",))
            self._expect("}")
            return node
        if opening == "|":
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("|")
            return Node("abs", (node,))
        if opening not in "([" or not opening:
            raise Unreadable(f"{opening!r} has no place in it as mathematics" if opening else "it breaks off")
        bars, self._bars = self._bars, 0
        node = self.listing(ends=(")", "]"))
        self._bars = bars
        closing = self._take().text
        if closing not in (")", "]"):
            raise Unreadable(f"{opening!r} is never closed")
        if node.op == "list":
            return Node("tuple", node.args, opening + closing)
        if (opening, closing) not in (("(", ")"), ("[", "]")):
            raise Unreadable(f"{opening!r} is closed by {closing!r}")
        return Node("group", (node,)) if node.op not in ("relation",) else node

    def _command(self, command: str) -> Node:
        forms: dict[str, Callable[[], Node]] = {
            r"\frac": lambda: Node("div", (self._group(), self._group())),
            r"\binom": lambda: Node("binomial", (self._group(), self._group())),
            r"\sqrt": self._root,
            r"\{": self._set,
            r"\emptyset": lambda: Node("set"),
            r"\begin": self._matrix,
            r"\boxed": self._group,
        }
        if command in forms:
            return forms[command]()
        if command in (r"\lfloor", r"\lceil", r"\langle"):
            return self._pair(command)
        if command in (r"\overline", r"\vec", r"\hat", r"\tilde", r"\underline", r"\angle", r"\triangle"):
            said = command + self._raw()
            while command in (r"\angle", r"\triangle") and self.next.kind == "letter" and self.next.glued:
                said += self._take().text
            return self._named(said)
        if command in FUNCTIONS:
            return self._function(command[1:])
        if command in CONSTANTS:
            return Node("constant", text=CONSTANTS[command])
        if command in GREEK:
            return self._named(command)
        if command in (r"\R", r"\Z", r"\N", r"\Q", r"\C"):
            return Node("space", text=command[1:])
        if command == r"\mp" or not command.strip("\\"):
            raise Unreadable("it breaks off")
        raise Unreadable(f"{command} is not known to the reward")

    def _pair(self, command: str) -> Node:
        node = self.listing(ends=(_CLOSING[command],))
        self._expect(_CLOSING[command])
        if command == r"\langle":
            return Node("tuple", node.args if node.op == "list" else (node,), "()")
        return Node(command[2:], (node,))

    def _root(self) -> Node:
        degree = number(2)
        if self._skip("["):
            degree = self.sum()
            self._expect("]")
        inner = self._primary() if not self._is("{") else self._group()
        return Node("root", (inner, degree))

    def _set(self) -> Node:
        if self._skip(r"\}"):
            return Node("set")
        bars, self._bars = self._bars, 1
        first = self.listing(ends=(r"\}",))
        self._bars = bars
        if self._skip("|", r"\mid", r"\vert"):
            condition = self.listing(ends=(r"\}",))
            self._expect(r"\}")
            return Node("builder", (first, condition))
        self._expect(r"\}")
        if first.op == "relation" and first.text.split()[-1] == ":":
            raise Unreadable("a set's condition could not be read")
        if first.op == "relation" and ":" in first.text.split():
            return _colon_builder(first)
        return Node("set", first.args if first.op == "list" else (first,))

    def _function(self, function: str) -> Node:
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
            node = _nary("mul", parts)
        node = node.args[0] if node.op == "group" else node
        inverse = power is not None and power == Node("neg", (number(1),)) and "arc" + function in FUNCTIONS
        args = node.args if node.op in ("tuple", "list") else (node,)
        node = Node("function", args if base is None else (*args, base), function + ("_" if base is not None else ""))
        if power is None:
            return node
        if inverse or power == Node("neg", (number(1),)):
            return Node("function", node.args, "arc" + function)
        return Node("pow", (node, power))

    def _matrix(self) -> Node:
        kind = self._raw()
        if kind not in _MATRICES:
            raise Unreadable(f"an environment {kind!r:.40} is not known to the reward")
        if kind == "array":
            self._raw()
        rows: list[list[Node]] = [[]]
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
        determinant = "determinant" if kind in ("vmatrix", "Vmatrix") else "matrix"
        return Node("matrix", tuple(each for row in rows for each in row), f"{determinant} {len(rows)}")


def _colon_builder(relation: Node) -> Node:
    signs = relation.text.split()
    cut = signs.index(":")
    left = Node("relation", relation.args[: cut + 1], " ".join(signs[:cut])) if cut else relation.args[0]
    right = Node("relation", relation.args[cut + 1 :], " ".join(signs[cut + 1 :]))
    return Node("builder", (left, right))


def _nary(op: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(op, tuple(parts))


def _too_deep(node: Node) -> bool:
    level, depth = [node], 0
    while level and depth <= MAX_TREE_DEPTH:
        level, depth = [each for node in level for each in node.args], depth + 1
    return bool(level)


def _proper(fraction: Node) -> bool:
    if fraction.op != "div":
        return False
    over, under = fraction.args
    return over.op == under.op == "number" and 0 < over.value < under.value and over.value.denominator == 1
