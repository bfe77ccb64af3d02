"""A place among the tokens of an answer, and numbers that take several of them."""

from collections.abc import Collection
from fractions import Fraction

from retool_mcore.reward.node import Term, constant_or_name, number
from retool_mcore.reward.tokens import Token, Unreadable

END = Token("sign", "")
LEAVES = ("number", "letter")
SIGNS_OF_ALL = ("sign", "command")  # what is no number, letter or word
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
         "eleven": 11, "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "hex": 16}  # fmt: skip


class Cursor:
    """The next token, and whether it is one of some; decimals that repeat, numbers in a base."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._at = 0
        self._depth = 0
        self._bars = 0  # open absolute values: a bar closes one instead of opening another

    @property
    def next(self) -> Token:
        try:
            return self._tokens[self._at]
        except IndexError:
            return END

    def _peek(self, ahead: int = 1) -> Token:
        try:
            return self._tokens[self._at + ahead]
        except IndexError:
            return END

    def _leaf(self, before: frozenset[str]) -> Term | None:
        """A whole number or letter with one of some signs behind it, of which END is ""; or None.

        It is taken at once: most groups, elements and factors are no more.
        """
        at = self._at
        try:
            token = self._tokens[at]
        except IndexError:
            return None
        if token.kind not in LEAVES:
            return None
        if self._peek().text not in before:
            return None
        if token.kind == "letter":
            self._at = at + 1
            return constant_or_name(token.text)
        if token.text.isdecimal():
            self._at = at + 1
            return number(token.text)
        return None

    def _take(self) -> Token:
        token = self.next
        self._at += 1
        return token

    def _skip(self, *texts: str) -> bool:
        """Take the next token if it is one of these signs or commands."""
        if self._among(texts):
            self._at += 1
            return True
        return False

    def _is(self, *texts: str) -> bool:
        return self._among(texts)

    def _among(self, texts: Collection[str]) -> bool:
        """``_is`` for many signs at once."""
        try:
            token = self._tokens[self._at]
        except IndexError:
            return False
        return token.text in texts and token.kind in SIGNS_OF_ALL

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise Unreadable(f"{text!r} is missing before {self.next.text!r}")

    def _decimal(self, token: Token) -> Term:
        """A number, with its repeating digits if it has any: ``0.1\\overline{6}``, ``0.1(6)``."""
        if (digits := self._repeating(token)) and len(digits) < 100:
            places = len(token.text.partition(".")[2])
            tail = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
            return Term("number", value=Fraction(token.text.rstrip(".")) + tail)
        return number(token.text)

    def _repeating(self, token: Token) -> str:
        """Take the digits that repeat: ``0.\\dot36\\dot1``, ``0.1(6)``. "" where none do."""
        if "." not in token.text or "e" in token.text.lower():
            return ""
        ahead = [self._peek(place) for place in range(3)]
        texts = [each.text for each in ahead]
        if texts[0] == "(" and texts[2] == ")" and ahead[1].text.isdigit() and all(each.glued for each in ahead):
            self._at += 3
            return texts[1]
        if self._is(r"\overline") and texts[1] == "{" and texts[2].isdigit() and self._peek(3).text == "}":
            self._at += 4
            return texts[2]
        if self._is(r"\overline") and texts[1].isdigit():
            self._tokens[self._at + 1] = Token("number", texts[1][1:], True)
            self._at += 1 if len(texts[1]) > 1 else 2
            return texts[1][0]
        return self._dotted()

    def _dotted(self) -> str:
        start, digits, dots = self._at, "", 0
        while dots < 2:
            if self._skip(r"\dot"):
                braced = self._skip("{")
                if not (self.next.kind == "number" and self.next.text.isdigit()):
                    break
                said = self._take().text
                if braced and not (len(said) == 1 and self._skip("}")):
                    break
                digits, dots = digits + said[0], dots + 1
                if len(said) > 1 and dots == 2:
                    break  # digits behind the last dot
                digits += said[1:]
            elif dots and self.next.kind == "number" and self.next.text.isdigit() and self.next.glued:
                digits += self._take().text
            else:
                break
        if digits and (dots == 2 or len(digits) == 1):
            return digits
        self._at = start
        return ""

    def _based(self, said: str) -> Term:
        """``1011_2``, ``(1011)_2``, ``1011_{\\text{two}}``, ``1A_{16}``: digits in a base."""
        self._take()
        braced = self._skip("{")
        while braced and (self._skip("(") or self._skip(")")):
            pass
        base = self._base()
        if not 2 <= base <= 36:
            raise Unreadable("the base of a number is no number from 2 to 36")
        if braced:
            self._skip(")")
            self._expect("}")
        try:
            return Term("group", (number(int(said, base)),))
        except ValueError as error:
            raise Unreadable(f"{said!r:.40} is no number of base {base}") from error

    def _base(self) -> int:
        token = self._take()
        if token.kind == "number" and token.text.isdigit():
            return int(token.text[:3])
        said = token.text.lower()
        while self.next.kind == "letter" and self.next.glued and token.kind == "letter":
            said += self._take().text.lower()
        return BASES.get(said, 0)
