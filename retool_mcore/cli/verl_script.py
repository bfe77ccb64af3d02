"""The settings in a run script of verl: assignments, defaults and one command. Nothing is run."""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from retool_mcore.errors import ConfigError

TRAINER = "main_ppo"  # verl's module, in the command that is looked for
# Commands after which variables may have other values than those that are read here.
REFUSED = {
    "if",
    "for",
    "while",
    "until",
    "case",
    "function",
    "eval",
    "source",
    ".",
    "read",
    "declare",
    "unset",
    "shift",
}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
EXPANSION = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$\((?P<pwd>pwd)\)|\$\{(?P<array>\w+)\[@\]\}|\$\{(?P<name>\w+)(?::?[-=](?P<default>[^}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)|\$(?P<arguments>[@*\d])"
)
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b,
}


@dataclass
class Script:
    """``overrides``: key=value of verl. ``path`` and ``name``: hydra's --config-path and -name."""

    overrides: list[str] = field(default_factory=list[str])
    path: str = ""
    name: str = ""


def read_script(text: str, source: str) -> Script:
    """Raises ConfigError for a script with control flow, and without exactly one such command.

    A variable that the script does not set stays as it is written, "$NAME".
    """
    variables: dict[str, list[str]] = {}
    found: list[list[str]] = []
    for words in _Reader(text, variables).statements():
        if words[0] in REFUSED:
            raise ConfigError(
                f"{source}: `{' '.join(words)[:60]}` is not followed, as no script is run here. Keep assignments and "
                "the one command of verl's trainer in it."
            )
        if any(TRAINER in word for word in words):
            found.append(words)
    if len(found) != 1:
        raise ConfigError(f"{source} has {len(found)} commands of verl's {TRAINER}. Give a script with one.")
    return _options(found[0])


def _options(words: list[str]) -> Script:
    made = Script()
    rest = iter(words[next(number for number, word in enumerate(words) if TRAINER in word) + 1 :])
    for word in rest:
        option, sign, value = word.partition("=")
        if option in ("--config-path", "-cp"):
            made.path = value if sign else next(rest, "")
        elif option in ("--config-name", "-cn"):
            made.name = value if sign else next(rest, "")
        elif sign and not word.startswith("-"):
            made.overrides.append(word)
    return made


class _Reader:
    """Splits bash into statements of words, and expands the variables that it has seen set."""

    def __init__(self, text: str, variables: dict[str, list[str]]) -> None:
        self._text, self._at, self._variables = re.sub(r"\\\r?\n", " ", text), 0, variables

    def statements(self) -> list[list[str]]:
        found: list[list[str]] = []
        while self._at < len(self._text):
            words = self._statement("\n;&|")
            if words[:1] == ["export"]:
                words = words[1:]
            while words and (match := ASSIGNMENT.fullmatch(words[0])):
                self._variables[match[1]] = [match[2]]
                words = words[1:]
            if words:
                found.append(words)
        return found

    def _statement(self, ends: str) -> list[str]:
        words: list[str] = []
        word: str | None = None
        quote = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if quote == "'":
                quote, word = ("", word) if char == "'" else (quote, (word or "") + char)
            elif char == "\\":
                word = (word or "") + self._text[self._at : self._at + 1]
                self._at += 1
            elif char in "'\"" and not (quote and char != quote):
                quote, word = ("" if quote else char), word or ""
            elif char == "$":
                values = self._expanded()
                word = (word or "") + values[0] if values else word
                for more in values[1:]:
                    words.append(word or "")
                    word = more
            elif quote:
                word = (word or "") + char
            elif char == "#" and word is None:
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif char == "(" and word and ASSIGNMENT.fullmatch(word) and word.endswith("="):
                self._variables[word[:-1]] = self._statement(")")
                word = None
            elif char in ends or char.isspace():
                if word is not None:
                    words.append(word)
                    word = None
                if char in ends:
                    return words
            else:
                word = (word or "") + char
        return words if word is None else [*words, word]

    def _expanded(self) -> list[str]:
        """What stands for the expansion before ``_at``: several words where it is an array."""
        match = EXPANSION.match(self._text, self._at - 1)
        if match is None:
            return ["$"]
        self._at = match.end()
        if match["sum"] is not None:
            return [_sum(_Reader(match["sum"], self._variables)._names())]
        if match["pwd"] or match["arguments"]:
            return ["."] if match["pwd"] else []
        known = self._variables.get(match["array"] or match["name"] or match["plain"])
        if known is None and match["default"] is not None:
            return [" ".join(_Reader(match["default"], self._variables)._statement(""))]
        return [match[0]] if known is None else known

    def _names(self) -> str:
        """The text of a sum, with the values of its variables, which need no $."""
        return re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._variables.get(match[1], [match[0]])[0], self._text
        )


def _sum(text: str) -> str:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"$(({text}))"
