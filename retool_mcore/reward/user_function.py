"""Calls a user's own reward function: ``reward.function = "module:name"``.

    def score(response: Response) -> float | Mapping[str, float]

A mapping contains "score", the reward of the response. It may contain named parts, the same for
every response; each becomes a metric ``reward/NAME``. The part "acc", 0 or 1, replaces the judge's
verdict in accuracy, the curriculum and the group filter.

Several threads call the function at a time, in each of ``reward.workers`` processes.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from retool_mcore.config.imports import import_object
from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.response import Response

RewardFunction = Callable[[Response], "float | Mapping[str, float]"]
RESERVED = frozenset({"pred", "extracted", "has_answer", "check_failed"})  # keys of ``Response.result``


class UserReward:
    """Wraps a user's reward function and checks its results.

    verl takes the columns of a batch from one response, so every response must have the same names.
    Raises ConfigError if the object cannot be called with one response.
    """

    def __init__(self, path: str, function: Any) -> None:
        setting = f'reward.function = "{path}"'
        if not callable(function):
            raise ConfigError(f"{setting} is of type {type(function).__name__}. Name a function.")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{setting} is an async function. Write a plain one. It may block, because threads call it."
            )
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise ConfigError(
                f"{setting} cannot be called with one response ({error}). Write def score(response)."
            ) from error
        self._setting, self._function = setting, cast("RewardFunction", function)
        self._names: set[str] | None = None

    def __call__(self, response: Response) -> dict[str, Any]:
        """Score a response. Returns the keys of ``score.compute_score`` and the named parts.

        Raises RewardError if the function raises, or if its result is invalid.
        """
        where = f"{self._setting}, data source {response.data_source!r}, truth {response.truth!r}"
        try:
            result = self._function(response)
        except Exception as error:  # the user's code may raise anything
            raise RewardError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        parts = self._check_parts(where, dict(result) if isinstance(result, Mapping) else {"score": result})
        score = parts.pop("score")
        acc = parts.pop("acc") if "acc" in parts else float(response.right)
        return response.result(score, acc) | {f"reward_{name}": value for name, value in parts.items()}

    def _check_parts(self, where: str, parts: Mapping[str, Any]) -> dict[str, float]:
        if "score" not in parts:
            raise RewardError(
                f'{where}: the result has no "score". It has {", ".join(map(str, parts)) or "no entries"}. Add "score".'
            )
        for name, value in parts.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RewardError(f"{where}: the result has {name} = {value!r}. Every part must be a finite number.")
            if name in RESERVED:
                raise RewardError(f"{where}: the result has a part named {name}, which is reserved. Rename it.")
        if parts.get("acc", 0) not in (0, 1):
            raise RewardError(f"{where}: the result has acc = {parts['acc']!r}. Return 1 for a right response, else 0.")
        names = self._names = self._names or set(parts)
        if names != set(parts):
            raise RewardError(
                f"{where}: the result has {', '.join(sorted(parts))}, but that of another response has "
                f"{', '.join(sorted(names))}. Return the same names for every response, with 0.0 for a missing part."
            )
        return {name: float(value) for name, value in parts.items()}


@lru_cache(maxsize=1)
def load_user_reward(path: str) -> UserReward:
    """Load the function that ``reward.function`` names, once per process. Raises ConfigError."""
    return UserReward(path, import_object("reward.function", path))
