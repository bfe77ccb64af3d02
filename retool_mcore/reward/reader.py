r"""Read an answer as mathematics, whole or not at all.

``read`` gives a tree of ``Term``. There is no recovery: a text of which one token has no place is
Unreadable, so no number inside it can stand for the whole. The grammar, from loose to tight: lists
(``,`` ``;`` and "or"), relations, unions, sums, products with or without a sign, powers.
"""

from retool_mcore.reward.atoms import Atoms
from retool_mcore.reward.cursor import END
from retool_mcore.reward.node import CONSTANTS, FUNCTIONS, GREEK, MAX_DEPTH, MAX_TREE_DEPTH, Term, nary, number
from retool_mcore.reward.series import progression
from retool_mcore.reward.tokens import Token, Unreadable, tokens
from retool_mcore.reward.units import CHINESE_SCALES, SCALES, bare_unit, per, temperature, unit_at

RELATIONS = frozenset((
    "=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv", r"\to", ":", r"\parallel", r"\perp",
    r"\notin", r"\sim", r"\cong", r"\subset", r"\subseteq", r"\propto",
))  # fmt: skip
FACTORS = frozenset({*FUNCTIONS, *CONSTANTS, *GREEK}) | frozenset((
    r"\frac", r"\sqrt", r"\binom", r"\lfloor", r"\lceil", r"\begin", r"\overline", r"\vec", r"\hat", r"\angle",
    r"\triangle", r"\nabla", r"\partial", r"\tilde", r"\underline", r"\{", r"\boxed", r"\sum", r"\prod",
))  # fmt: skip
TIMES, PLUS = ("*", "/"), ("+", "-")
_ENDS_ELEMENT = frozenset(("", ",", ")", "]", "}", r"\}", ";"))
_ENDS_FACTOR = frozenset(("+", "-", "*", "/", "=", "<", ">", "|", "&")) | _ENDS_ELEMENT
ENDS = frozenset("+-)]},=<>&;:")  # a sign behind which no product goes on
POSTFIX = ("!", r"\degree", "_")
SIGNS = frozenset(("+", "-", r"\pm", r"\mp"))
DENYING = frozenset(("not", "no", "never", "wrong", "incorrect", "without", "except"))  # in a name of words
_JOINING = {"": "", "or": "or", "and": "and", "but": "and", "或": "or", "且": "and", "和": "and", "与": "and"}
_SPACES = frozenset("RZNQC")
_SETS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "without"}


def read(text: str) -> Term:
    """The tree of a whole answer. Raises Unreadable, which says what has no place in it."""
    found = tokens(text)
    reader = _Reader(found)
    node = reader.listing()
    if reader.next is not END:
        raise Unreadable(f"{reader.next.text!r} has no place in it as mathematics")
    if len(found) > MAX_TREE_DEPTH // 3 and _too_deep(node):
        raise Unreadable("it is nested too deeply")
    return node


def read_measured(text: str, unit: str) -> Term | None:
    """The value of an answer whose last letters are a unit (see ``bare_unit``); None for others."""
    try:
        found = tokens(text)
        told = bare_unit(found, unit)
        if told is None:
            return None
        start, unit = told
        reader = _Reader(found[:start])
        node = reader.listing()
    except Unreadable:
        return None
    if reader.next is not END or _too_deep(node):
        return None
    if node.op == "relation":  # F = 9.8 N
        return Term("relation", (*node.args[:-1], Term("unit", (node.args[-1],), unit)), node.text)
    return Term("unit", (node,), unit)


class _Reader(Atoms):
    """Lists, relations, sums, products and powers, by recursive descent."""

    def listing(self, *, ends: tuple[str, ...] = ()) -> Term:
        """Statements between commas; a single one stands for itself."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        parts = [self.statement()]
        if self.next is END:
            self._depth -= 1
            return parts[0]
        words: set[str] = set()
        while not self._is(*ends) and (word := self._separator()):
            words.add(word)
            if self.next is END or self._is(*ends):
                break
            parts.append(self.statement())
        self._depth -= 1
        if len(parts) == 1:
            return parts[0]
        return Term("list", tuple(parts), "and" if "and" in words else "or" if "or" in words else "")

    def _separator(self) -> str:
        found = ""
        while True:
            token = self.next
            word = token.text.lower().strip(" ,") if token.kind in ("text", "word") else token.text
            if token.kind in ("text", "word") and word in _JOINING:
                found = _JOINING[word] or found or ","
            elif token.kind in ("command", "sign") and word in (",", ";", r"\vee", r"\wedge", "&"):
                found = {r"\vee": "or", r"\wedge": "and", "&": "and"}.get(word, found or ",")
            else:
                return found
            self._at += 1

    def statement(self) -> Term:
        if (leaf := self._leaf(_ENDS_ELEMENT)) is not None:
            return leaf
        self._skip(r"\approx")
        first = self._sets()
        if not self._among(RELATIONS):
            return first
        sides, signs = [first], list[str]()
        while self._among(RELATIONS):
            signs.append(self._take().text)
            side = self._sets()
            is_space = side.op == "name" and side.text in _SPACES and signs[-1] == r"\in"
            sides.append(Term("space", text=side.text) if is_space else side)
        if r"\equiv" in signs and not any(each.op == "mod" for each in sides):
            signs = ["=" if sign == r"\equiv" else sign for sign in signs]  # f(x) is 0 everywhere
        return Term("relation", tuple(sides), " ".join(signs))

    def _sets(self) -> Term:
        node = self.sum(units=True)
        while self.next.text in _SETS and self._is(*_SETS):
            op = _SETS[self._take().text]
            node = Term(op, (node, self.sum(units=True)))
        return node

    def sum(self, *, units: bool = False) -> Term:
        """A sum, with a percent sign or a unit behind it where ``units`` may stand."""
        negative = False
        sign = ""
        while self._among(SIGNS):
            token = self._take().text
            negative ^= token == "-"
            sign = token if token.startswith("\\") else sign
        node = self._product()
        node = Term("neg", (node,)) if negative else node
        node = Term("pm", (number(0), node), sign) if sign else node
        parts = [node]
        while self._among(SIGNS):
            op = self._take().text
            if op == "+" and self._is(r"\ldots") and self._peek().text == "+":
                self._at += 2
                parts = [progression(parts, self._product())]
                continue
            right = self._product()
            if op.startswith("\\"):
                parts = [Term("pm", (nary("add", parts), right), op)]
            else:
                parts.append(right if op == "+" else Term("neg", (right,)))
        node = nary("add", parts)
        if parts[0].op == "space" and len(parts) == 2 and parts[1].op == "neg":
            node = Term("without", (parts[0], parts[1].args[0]))  # \mathbb{R} - \{2\}
        token = self.next
        if token is END or (token.kind == "sign" and token.text in ENDS):
            return node
        if self._is(r"\bmod", r"\pmod"):
            self._take()
            braced = self._skip("(") or self._skip("{")
            node = Term("mod", (node, self.sum()))
            if braced and not (self._skip(")") or self._skip("}")):
                raise Unreadable("the modulus has no end")
        if self._is(r"\over", r"\choose"):
            op = "div" if self._take().text == r"\over" else "binomial"
            node = Term(op, (node, self.sum()))
        return self._unit(node) if units else node

    def _unit(self, node: Term) -> Term:
        while self.next.kind in ("word", "text"):
            word, _, rest = self.next.text.partition(" ")
            if word[:1] in CHINESE_SCALES:
                node = Term("mul", (node, number(CHINESE_SCALES[word[0]])))
                self._tokens[self._at] = Token("text", word[1:], True)
                self._at += not word[1:]
                continue
            if word.lower() not in SCALES:
                break
            node = Term("mul", (node, number(SCALES[word.lower()])))
            self._at += not rest
            if rest:
                self._tokens[self._at] = Token(self.next.kind, rest)
        if self._skip(r"\%"):
            return Term("percent", (node,))
        if self.next.text in ("C", "F") and (warm := temperature(node, self.next.text)) is not None:
            self._at += 1
            return warm
        over = int(self._is("/"))
        unit, end = unit_at(self._tokens, self._at + over)
        if unit is not None:
            self._at, unit = end, per(unit) if over else unit  # 3.75/lb
        if unit == "degree^1":
            return Term("degree", (node,))
        return Term("unit", (node,), unit) if unit is not None else node

    def _product(self) -> Term:
        parts = [self._factor()]
        while True:
            token = self.next
            if token is END or (token.kind == "sign" and token.text in ENDS):
                return nary("mul", parts)
            if self._among(TIMES):
                if unit_at(self._tokens, self._at + 1)[0] is not None:
                    self._at += self._is("*")
                    return nary("mul", parts)
                if self._take().text == "*":
                    parts.append(self._factor())
                else:
                    parts = [Term("div", (nary("mul", parts), self._factor()))]
            elif (self._is(r"\frac") and unit_at(self._tokens, self._at)[0]) or (
                parts[-1].op == "degree" and self.next.text in ("C", "F") and self._peek() is END
            ):
                return nary("mul", parts)
            elif self._starts_factor() or self._spelt_by_letters(parts):
                self._juxtapose(parts)
            else:
                return nary("mul", parts)

    def _spelt_by_letters(self, parts: list[Term]) -> bool:
        """Letters that also spell a unit, such as ``cm`` in ``3a^2cm`` and ``3cm\\pi``: a product.

        They are when they are glued to a name, or when the product goes on behind them.
        """
        token = self.next
        if token.kind != "word" or len(token.text) > 3 or not token.glued:
            return False
        end, here = unit_at(self._tokens, self._at)[1], self._at
        self._at = end
        goes_on = end > here and self._starts_factor()
        self._at = here
        if not (goes_on or any(map(_holds_name, parts))):
            return False
        self._tokens[here : here + 1] = [Token("letter", letter, True) for letter in token.text]
        return True

    def _juxtapose(self, parts: list[Term]) -> None:
        """A product without a sign; a whole number before a proper fraction is a mixed number."""
        last = parts[-1]
        whole = last.args[0] if last.op == "neg" else last
        glued = self.next.glued
        is_fraction, beside = self._is(r"\frac"), whole.op == "number" and self.next.kind == "number"
        right = self._factor()
        if whole.op == "number" and whole.text.isdigit() and len(parts) == 1:
            if beside and right.op == "number" and self._is("/") and self._peek().kind == "number":
                self._take()
                right, beside = Term("div", (right, self._factor())), False
                is_fraction = _proper(right)
                beside = not is_fraction
            if is_fraction and right.op == "degree" and _proper(right.args[0]):
                parts[-1] = Term("degree", (Term("group", (Term("add", (whole, right.args[0])),)),))
                parts[-1] = parts[-1] if last is whole else Term("neg", (parts[-1],))
                return
            if is_fraction and _proper(right):
                mixed = Term("group", (Term("add", (whole, right)),))
                parts[-1] = mixed if last is whole else Term("neg", (mixed,))
                return
            if is_fraction and right.op == "div" and all(part.text.isdigit() for part in right.args):
                raise Unreadable("a whole number before a fraction above 1 is neither a product nor mixed")
        if beside or (last.op == "name" and right.op == "number" and glued):
            raise Unreadable("two numbers, or a name and a number, stand side by side")
        parts.append(right)

    def _starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "letter"):
            return True
        if token.text in (r"\min", r"\sec") and unit_at(self._tokens, self._at)[0]:
            return False
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)
        return token.kind == "command" and token.text in FACTORS

    def _factor(self) -> Term:
        if (leaf := self._leaf(_ENDS_FACTOR)) is not None:
            return leaf
        negative = False
        while self._among(PLUS):
            negative ^= self._take().text == "-"
        node = self._postfix(self._primary())
        if self.next.text != "^":
            return Term("neg", (node,)) if negative else node
        while self._skip("^"):
            if self._is(r"\degree", r"\circ") or (self._is("{") and self._peek().text in (r"\circ", r"\degree")):
                braced = self._skip("{")
                self._take()
                if braced:
                    self._expect("}")
                node = Term("degree", (node,))
            else:
                node = Term("pow", (node, self._exponent()))
            node = self._postfix(node)
        return Term("neg", (node,)) if negative else node

    def _exponent(self) -> Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        if self._is("-", "+"):
            negative = self._take().text == "-"
            node = self._postfix(self._primary())
            node = Term("neg", (node,)) if negative else node
        else:
            node = self._primary()
        if not self._is("}") and self._is("^"):
            self._take()
            node = Term("pow", (node, self._exponent()))
        self._depth -= 1
        return node

    def _postfix(self, node: Term) -> Term:
        while self._among(POSTFIX):
            if self._skip("!"):
                node = Term("factorial", (node,))
            elif self._skip(r"\degree"):
                node = Term("degree", (node,))
            elif said := _digits_of(node):
                node = self._based(said)
            else:
                return node
        return node

    def _named_by_words(self, token: Token) -> Term | None:
        """``\\text{Area} = 33``: words before the first sign of equality are a name."""
        if token.kind == "text" and token.text.endswith(":") and self._at == 1:  # \text{Answer: } 33
            self._tokens.insert(self._at, Token("sign", ":"))
        words, ahead = [token.text.rstrip(": ")], 0
        while self._peek(ahead).kind in ("word", "text", "letter"):
            words.append(self._peek(ahead).text)
            ahead += 1
        whole = all(len(word) > 2 and not word.endswith(" is") for word in words)  # no "Solution is:"
        labelled = self._peek(ahead).text == ":" and whole
        named = labelled or self._peek(ahead).text in ("=", r"\approx")
        if not named or len(words) > 4 or self._at + ahead > len(words):
            return None
        said = " ".join(words).casefold()
        if DENYING & set(said.split()):
            return None
        self._at += ahead
        if labelled:
            self._tokens[self._at] = Token("sign", "=")
        return Term("name", text=said)

    def _primary(self) -> Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        node = self._read_primary()
        self._depth -= 1
        return node

    def _read_primary(self) -> Term:
        token = self._take()
        if token.kind == "number":
            if token.text.isdecimal():
                return number(token.text)
            if token.text[-1].isalpha() or (
                not token.text.replace(".", "").isdigit() and "e" not in token.text.lower()
            ):
                return Term("digits", text=token.text)
            return self._decimal(token)
        if token.kind == "letter":
            return self._named(token.text)
        if token.kind == "sign":
            return self._enclosed(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.kind in ("text", "word") and (named := self._named_by_words(token)):
            return named
        if token.kind == "word" and len(token.text) < 4 and token.text not in ("or", "and", "of"):
            return nary("mul", [self._named(letter) for letter in token.text])
        if token.kind == "text" and token.text.isalpha() and token.text.isascii() and len(token.text) < 3:
            return nary("mul", [self._named(letter) for letter in token.text])
        if token.kind == "text" and token.text and (self._is("=", "_") or self._at > 1):
            raise Unreadable(f"the words {token.text!r:.60} stand inside it")
        raise Unreadable(f"the words {token.text!r:.60} are no mathematics" if token.text else "it breaks off")


def _holds_name(node: Term) -> bool:
    return node.op == "name" or any(map(_holds_name, node.args))


def _digits_of(node: Term) -> str:
    """The digits of a number that a base may follow, as written; "" for anything else."""
    if node.op == "group" and node.args[0].op in ("number", "digits"):
        node = node.args[0]
    return node.text if node.op == "digits" or (node.op == "number" and node.text.isdigit()) else ""


def _too_deep(node: Term) -> bool:
    level, depth = [node], 0
    while level and depth <= MAX_TREE_DEPTH:
        level, depth = [each for node in level for each in node.args], depth + 1
    return bool(level)


def _proper(fraction: Term) -> bool:
    if fraction.op != "div":
        return False
    over, under = fraction.args
    return over.op == under.op == "number" and 0 < over.value < under.value and over.value.denominator == 1
