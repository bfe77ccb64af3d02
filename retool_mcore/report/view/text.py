"""Prepares texts for a page: decodes tokens with the run's tokenizer, highlights code."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from pygments.lexers.python import PythonLexer  # pyright: ignore[reportMissingTypeStubs]
from pygments.token import STANDARD_TYPES

from retool_mcore.data.chat import decode
from retool_mcore.data.tokenizer import from_pretrained
from retool_mcore.errors import DataError

HIGHLIGHT_CHARS = 50_000  # longer code is not highlighted
_LEXER = PythonLexer(stripnl=False, ensurenl=False)


class Tokens:
    """Decodes token ids, each once. ``where``: the tokenizer's model, or "" if none was found."""

    def __init__(self, models: Iterable[str], asked: Path | None = None) -> None:
        self.where, self._tokenizer, self._texts = "", None, dict[int, str]()
        if asked is not None and not (asked / "tokenizer_config.json").is_file():
            raise DataError(f"--tokenizer {asked} has no tokenizer_config.json. Give a model's directory.")
        for model in (str(asked),) if asked else models:
            if (Path(model) / "tokenizer_config.json").is_file():
                self._tokenizer, self.where = _load(model), model
                return

    def text(self, ids: Sequence[int]) -> str | None:
        """Decode all ids to one text; None without a tokenizer."""
        return decode(self._tokenizer, ids) if self._tokenizer is not None else None

    def note(self, ids: Iterable[int]) -> None:
        """Add the texts of ``ids`` to ``table``."""
        if self._tokenizer is None:
            return
        for token in set(ids) - self._texts.keys():
            self._texts[token] = decode(self._tokenizer, [token], clean_up=False)

    @property
    def table(self) -> dict[int, str]:
        """The text of every id noted so far; an incomplete character is U+FFFD."""
        return self._texts


def _load(model: str) -> Any:
    try:
        return from_pretrained(model)
    except (OSError, ValueError, KeyError, json.JSONDecodeError, ImportError) as error:
        raise DataError(f"the tokenizer of {model} cannot be read: {error}. Give another with --tokenizer.") from error


def highlighted(code: str) -> list[tuple[str, str]]:
    """Split Python code into (CSS class, text) pairs without markup. The texts join to the code."""
    if len(code) > HIGHLIGHT_CHARS:
        return [("", code)]
    pairs: list[tuple[str, str]] = []
    for kind, text in cast("Iterable[tuple[Any, str]]", _LEXER.get_tokens(code)):
        name = STANDARD_TYPES.get(kind, "")
        if pairs and pairs[-1][0] == name:
            pairs[-1] = (name, pairs[-1][1] + text)
        else:
            pairs.append((name, text))
    return pairs
