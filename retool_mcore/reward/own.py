"""A user's own reward: ``reward.function = "module:name"``, with named parts that are logged.

    def score(response: Response) -> float | Mapping[str, float]

A mapping has "score", the reward of the response, and any other names, the same for every response;
each becomes a metric ``reward/NAME``. The name "acc", if there, is what accuracy, the curriculum
and filters of groups count as right, 0 or 1; without it the answer is judged as by default.

The function is called from several threads at a time, in each of ``reward.workers`` processes.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from retool_mcore.config.named import load_named
from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.response import Response

RewardFunction = Callable[[Response], "float | Mapping[str, float]"]
RESERVED = frozenset({"pred", "extracted", "has_answer", "check_failed"})  # names that a scored response has already


class OwnReward:
    """The function that a run names, its results checked. Raises ConfigError if it is none.

    verl stores the names of one response as columns of all, so they may not differ.
    """

    def __init__(self, path: str, function: Any) -> None:
        setting = f'reward.function = "{path}"'
        if not callable(function):
            raise ConfigError(f"{setting} is of type {type(function).__name__}, not a function.")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{setting} is an async function. Write a plain one: it is called in threads of its own, and may wait."
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
        """Score a response; returns what ``score.compute_score`` returns, and the parts.

        Raises RewardError for a result that cannot be used, and for whatever the function raises.
        """
        where = f"{self._setting}, data source {response.data_source!r}, truth {response.truth!r}"
        try:
            result = self._function(response)
        except Exception as error:  # the user's own code, whatever it does
            raise RewardError(f"{where}: it failed with {type(error).__name__}: {error}") from error
        parts = self._checked(where, dict(result) if isinstance(result, Mapping) else {"score": result})
        score = parts.pop("score")
        acc = parts.pop("acc") if "acc" in parts else float(response.right)
        return response.result(score, acc) | {f"reward_{name}": value for name, value in parts.items()}

    def _checked(self, where: str, parts: Mapping[str, Any]) -> dict[str, float]:
        if "score" not in parts:
            raise RewardError(f'{where}: it returned {", ".join(map(str, parts)) or "nothing"} without "score".')
        for name, value in parts.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RewardError(f"{where}: it returned {name} = {value!r}. Every part must be a finite number.")
            if name in RESERVED:
                raise RewardError(f"{where}: it returned a part named {name}, which responses have already. Rename it.")
        if parts.get("acc", 0) not in (0, 1):
            raise RewardError(f"{where}: it returned acc = {parts['acc']!r}. A response is right, 1, or not, 0.")
        names = self._names = self._names or set(parts)
        if names != set(parts):
            raise RewardError(
                f"{where}: it returned {', '.join(sorted(parts))}, and for another response "
                f"{', '.join(sorted(names))}. Return the same names for every response, 0.0 where one has no part."
            )
        return {name: float(value) for name, value in parts.items()}


@lru_cache(maxsize=1)
def open_own_reward(path: str) -> OwnReward:
    """The function that ``reward.function`` names, loaded once in a process. Raises ConfigError."""
    return OwnReward(path, load_named("reward.function", path))
