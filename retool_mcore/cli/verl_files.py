"""Reads the settings in verl's files: YAML, overrides, or a run script. Runs nothing.

A run script may have assignments, defaults and one command of verl's trainer.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retool_mcore.errors import ConfigError

SFT_SECTIONS = ("engine", "optim", "model")  # top-level sections that only verl's SFT files have
TRAINER = "main_ppo"  # module of verl's trainer; its command has the settings
# Commands that may change variables in ways that this parser does not follow.
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
    """The arguments of verl's trainer.

    ``overrides``: "key=value" of verl. ``path``, ``name``: Hydra's --config-path and --config-name.
    """

    overrides: list[str] = field(default_factory=list[str])
    path: str = ""
    name: str = ""


def read_file(path: Path) -> Any:
    """Read verl's YAML, a run script, or a file of overrides ("key=value", one per line).

    Returns an OmegaConf table. Raises ConfigError.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        if path.suffix in (".yaml", ".yml"):
            table = OmegaConf.load(path)
        elif TRAINER in (text := path.read_text(encoding="utf-8")):
            script = read_script(text, str(path))
            table = OmegaConf.merge(_config_file(script, path), overrides(script.overrides, str(path)))
        else:
            lines = [line.strip().rstrip("\\").strip() for line in text.splitlines()]
            table = overrides([line for line in lines if line and not line.startswith("#")], str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or path}: {error.strerror}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    if not OmegaConf.is_dict(table):
        raise ConfigError(f"{path} is not a table of verl's settings. Give the YAML of verl's trainer.")
    if any(name in table for name in SFT_SECTIONS):
        raise ConfigError(
            f"{path} is a file for verl's SFT, but only RL files can be converted. docs/from_verl.md lists the few "
            "keys of SFT."
        )
    return table


def _config_file(script: Script, source: Path) -> Any:
    """The YAML of --config-path and --config-name; only model_engine for verl's own file."""
    from omegaconf import OmegaConf

    if not script.name or (not script.path and script.name.startswith("ppo_")):
        return OmegaConf.create({"model_engine": "megatron"} if "megatron" in script.name else {})
    file = f"{script.name.removesuffix('.yaml')}.yaml"
    paths = [folder / script.path / file for folder in (Path(), source.parent)]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{source} has --config-name {script.name}, but neither {' nor '.join(map(str, paths))} exists. Run this "
            "command in the folder from which you start the script."
        )
    return OmegaConf.load(found)


def overrides(lines: list[str], source: str) -> Any:
    """Parse verl's overrides into a table. Raises ConfigError for any other line, such as bash."""
    from omegaconf import OmegaConf

    for line in lines:
        if not re.fullmatch(r"~?\+{0,2}[A-Za-z_][\w.]*=.*", line, re.S):
            raise ConfigError(
                f"{source}: {line!r} is not a key=value of verl. Give a run script, or one override per line."
            )
    return OmegaConf.from_dotlist([line.lstrip("+") for line in lines])


def read_script(text: str, source: str) -> Script:
    """Parse a bash script that starts verl's trainer. ``source`` names the script in errors.

    A variable that the script does not set stays as "$NAME". Raises ConfigError for a script with
    control flow, or without exactly one command of the trainer.
    """
    variables: dict[str, list[str]] = {}
    found: list[list[str]] = []
    for words in _Reader(text, variables).statements():
        if words[0] in REFUSED:
            raise ConfigError(
                f"{source}: `{' '.join(words)[:60]}` is not supported, because the script is read and not run. Keep "
                "only assignments and the command of verl's trainer."
            )
        if any(TRAINER in word for word in words):
            found.append(words)
    if len(found) != 1:
        raise ConfigError(f"{source} starts verl's {TRAINER} {len(found)} times. Give a script that starts it once.")
    return _options(found[0])


def _options(words: list[str]) -> Script:
    script = Script()
    rest = iter(words[next(number for number, word in enumerate(words) if TRAINER in word) + 1 :])
    for word in rest:
        option, sign, value = word.partition("=")
        if option in ("--config-path", "-cp"):
            script.path = value if sign else next(rest, "")
        elif option in ("--config-name", "-cn"):
            script.name = value if sign else next(rest, "")
        elif sign and not word.startswith("-"):
            script.overrides.append(word)
    return script


class _Reader:
    """Splits bash into statements of words, and expands variables that the script sets."""

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
                values = self._expand()
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

    def _expand(self) -> list[str]:
        """Expand the "$..." before ``_at``. An array expands to several words."""
        match = EXPANSION.match(self._text, self._at - 1)
        if match is None:
            return ["$"]
        self._at = match.end()
        if match["sum"] is not None:
            return [_arithmetic(_Reader(match["sum"], self._variables)._substituted())]
        if match["pwd"] or match["arguments"]:
            return ["."] if match["pwd"] else []
        known = self._variables.get(match["array"] or match["name"] or match["plain"])
        if known is None and match["default"] is not None:
            return [" ".join(_Reader(match["default"], self._variables)._statement(""))]
        return [match[0]] if known is None else known

    def _substituted(self) -> str:
        """Substitute variables in an arithmetic expression, with or without "$"."""
        return re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._variables.get(match[1], [match[0]])[0], self._text
        )


def _arithmetic(text: str) -> str:
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
