"""Regular expressions of a tool's schema, matched in time that no text can stretch.

Python's engine backtracks: 26 characters keep ``^(a+)+$`` busy for 20 s. Here the expression is
read by Python's parser and run as a set of states, one step for each character and state. What
needs backtracking (references, lookaround) is refused when the schema is read.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

MAX_STATES = 2_000
MAX_TEXT_CHARS = 16_384
_CACHED_STEPS = 20_000

# An edge is (test, target): test is None for a free step, a str for a position, else callable.
_Edge = tuple[Any, int]


class NotLinear(ValueError):
    """An expression that is no expression of Python's, is too large, or needs backtracking."""


class LinearPattern:
    """``search`` says whether the expression matches anywhere, as JSON schema asks."""

    def __init__(self, pattern: str) -> None:
        parser = _parser()
        try:
            compiled = re.compile(pattern)
            tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise NotLinear(f"pattern {pattern!r} is none that Python reads: {error}") from error
        if compiled.flags & ~re.UNICODE:
            raise NotLinear(f"pattern {pattern!r} sets flags, which are not understood here")
        self._pattern = pattern
        self._edges: list[list[_Edge]] = []
        self._start = self._state()
        self._end = self._sequence(list(tree), self._start)
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def search(self, text: str) -> bool:
        """Whether it matches somewhere in ``text``."""
        states: frozenset[int] = frozenset()
        for at in range(len(text) + 1):
            states = self._closure(states | {self._start}, text, at)
            if self._end in states:
                return True
            if at < len(text):
                states = self._step(states, text[at])
        return False

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        key = (states, character)
        if (found := self._steps.get(key)) is None:
            found = frozenset(
                target for state in states for test, target in self._edges[state] if callable(test) and test(character)
            )
            if len(self._steps) >= _CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = found
        return found

    def _closure(self, states: frozenset[int], text: str, at: int) -> frozenset[int]:
        reached, waiting = set(states), list(states)
        while waiting:
            for test, target in self._edges[waiting.pop()]:
                if target not in reached and (test is None or (isinstance(test, str) and _holds(test, text, at))):
                    reached.add(target)
                    waiting.append(target)
        return frozenset(reached)

    # ------------------------------------------------------------- building

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise NotLinear(f"pattern {self._pattern!r} has more than {MAX_STATES} states")
        self._edges.append([])
        return len(self._edges) - 1

    def _sequence(self, items: list[Any], start: int) -> int:
        for item in items:
            start = self._item(item, start)
        return start

    def _item(self, item: Any, start: int) -> int:
        name, value = str(item[0]), item[1]
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            end = self._state()
            self._edges[start].append((str(value) if name == "AT" else _test(name, value), end))
            return end
        if name == "SUBPATTERN":
            if value[1] or value[2]:
                raise NotLinear(f"pattern {self._pattern!r} sets flags, which are not understood here")
            return self._sequence(list(value[3]), start)
        if name == "BRANCH":
            end = self._state()
            for branch in value[1]:
                first = self._state()
                self._edges[start].append((None, first))
                self._edges[self._sequence(list(branch), first)].append((None, end))
            return end
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = cast("tuple[int, Any, Any]", value)
            return self._repeat(least, most, items, start)
        raise NotLinear(f"pattern {self._pattern!r} needs backtracking ({name.lower()})")

    def _repeat(self, least: int, most: Any, items: Any, start: int) -> int:
        for _ in range(least):
            start = self._sequence(list(items), start)
            self._state()  # counts repeats of nothing too
        unbounded = str(most) == "MAXREPEAT"
        end = self._state()
        self._edges[start].append((None, end))
        if unbounded:
            first = self._state()
            self._edges[start].append((None, first))
            last = self._sequence(list(items), first)
            self._edges[last] += [(None, first), (None, end)]
            return end
        for _ in range(int(most) - least):
            start = self._sequence(list(items), start)
            self._edges[start].append((None, end))
            self._state()
        return end


@lru_cache(maxsize=256)
def linear(pattern: str) -> LinearPattern:
    """The pattern, read once. Raises NotLinear."""
    return LinearPattern(pattern)


def _parser() -> Any:
    import re._parser as parser  # pyright: ignore[reportMissingImports]

    return parser


def _test(name: str, value: Any) -> Callable[[str], bool]:
    if name == "LITERAL":
        return lambda character: ord(character) == value
    if name == "NOT_LITERAL":
        return lambda character: ord(character) != value
    if name == "ANY":
        return lambda character: character != "\n"
    parts = list(value)
    negated = bool(parts) and str(parts[0][0]) == "NEGATE"
    tests = [_part(str(part), inner) for part, inner in parts[negated:]]
    return lambda character: any(test(character) for test in tests) != negated


def _part(name: str, value: Any) -> Callable[[str], bool]:
    if name == "LITERAL":
        return lambda character: ord(character) == value
    if name == "RANGE":
        return lambda character: value[0] <= ord(character) <= value[1]
    kind = str(value).removeprefix("CATEGORY_")
    negated, kind = kind.startswith("NOT_"), kind.removeprefix("NOT_")
    single = re.compile({"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[kind])
    return lambda character: (single.match(character) is not None) != negated


def _holds(position: str, text: str, at: int) -> bool:
    if position in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return at == 0
    if position == "AT_END_STRING":
        return at == len(text)
    if position == "AT_END":
        return at == len(text) or (at == len(text) - 1 and text[at] == "\n")
    before, after = at > 0 and _is_word(text[at - 1]), at < len(text) and _is_word(text[at])
    return (before != after) == (position == "AT_BOUNDARY")


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()
