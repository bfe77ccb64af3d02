"""Which warm image a code starts in, guessed from its text."""

import re
from collections.abc import Iterable

_IMPORT_BEFORE = re.compile(r"(?:^|[\n;:])[ \t]*(?:import|from)[ \t][^\n;]*\Z")
_GUESSED_CHARS, _GUESSED_NAMES = 32_000, 100


class ImportGuess:
    """Guesses from its text whether code imports a package of the full image.

    Only to start in the right image: this process never parses hostile code. The child reads the
    AST, and asks for the full image where the guess was wrong.
    """

    def __init__(self, heavy: Iterable[str]) -> None:
        self._name = re.compile(r"\b(?:" + "|".join(sorted(heavy)) + r")\b")

    def __call__(self, code: str) -> bool:
        """Takes time that code cannot stretch.

        Of longer code, and code that names the packages more often, the guess is yes: the full
        image runs any code.
        """
        if len(code) > _GUESSED_CHARS:
            return True
        for number, name in enumerate(self._name.finditer(code)):
            before = code[max(0, name.start() - 200) : name.start()]
            if number >= _GUESSED_NAMES or _IMPORT_BEFORE.search(before, max(0, before.rfind("\n"))):
                return True
        return False
