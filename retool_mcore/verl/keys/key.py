"""One declaration of each key of verl that we set or refuse."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NOT_SET: Any = object()
OLD_LOG_PROB = 'algorithm.old_log_prob = "actor" or "rollout"'
OWN_PART = "this trainer, which relies on a part of its own there,"


@dataclass(frozen=True)
class Key:
    """A key of verl, or a table of them, and what we do with it.

    ``decided_by`` is the setting of ours that says the same, or who needs the value that we give:
    [verl_overrides] may not set the key raw, nor what lies below it. None: ours is a better default
    than verl's, and the user's raw value wins.

    ``value`` is what the key is set to, or a function that makes it of what ``values`` is given.
    Without it the key is refused alone. ``when`` says for which runs it is set; for others verl's
    own default stands; so it does where a function returns NOT_SET.
    """

    path: str
    decided_by: str | None
    value: Any = NOT_SET
    when: Callable[..., bool] | None = None


def same(path: str, setting: str) -> Key:
    """A key of verl that has the value of our ``setting``, "optim.lr" for example."""
    read = attrgetter(setting)
    return Key(path, setting, lambda run, *_: read(run))


def values(keys: Iterable[Key], *given: Any, under: str = "") -> dict[str, Any]:
    """The values of ``keys`` for a run: ``under`` + path -> value.

    ``given`` is passed to each key's functions.
    """
    made = (
        (under + key.path, key.value(*given) if callable(key.value) else key.value)
        for key in keys
        if key.when is None or key.when(*given)
    )
    return {path: value for path, value in made if value is not NOT_SET}


def refused(keys: Iterable[Key], *, under: str = "") -> dict[str, str]:
    """The keys that [verl_overrides] may not set: ``under`` + path -> what decides it."""
    return {under + key.path: key.decided_by for key in keys if key.decided_by is not None}
