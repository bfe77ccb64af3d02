"""Declares a key of verl that we set, or that users may not set."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NOT_SET: Any = object()
# Prefixes of keys in RL's tree:
ACTOR_PREFIX, REFERENCE_PREFIX, CRITIC_PREFIX = "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic."
ROLLOUT_PREFIX = "actor_rollout_ref.rollout."
OLD_LOG_PROB = 'algorithm.old_log_prob = "actor" or "rollout"'
OUR_CODE = "this trainer's code for that part of verl"


@dataclass(frozen=True)
class Key:
    """A key of verl, or a table of keys, with the value that we set.

    ``decided_by``: the setting of ours that controls the key, or the part of our code that needs
    our value. [verl_overrides] may not set the key or any key below it. None: our value is only a
    default, and [verl_overrides] may change it.

    ``value``: the key's value, or a function of the arguments of ``values`` that returns it.
    Without a value, the key is refused but not set.

    ``when``: function of the same arguments; False keeps verl's default, as does a value function
    that returns NOT_SET.
    """

    path: str
    decided_by: str | None
    value: Any = NOT_SET
    when: Callable[..., bool] | None = None


def from_setting(path: str, setting: str, when: Callable[..., bool] | None = None) -> Key:
    """A key of verl whose value is our ``setting``, for example "optim.lr"."""
    read = attrgetter(setting)
    return Key(path, setting, lambda run, *_: read(run), when)


def values(keys: Iterable[Key], *arguments: Any, under: str = "") -> dict[str, Any]:
    """The values of ``keys`` for a run: ``under`` + path -> value.

    ``arguments``: those of the keys' functions.
    """
    pairs = (
        (under + key.path, key.value(*arguments) if callable(key.value) else key.value)
        for key in keys
        if key.when is None or key.when(*arguments)
    )
    return {path: value for path, value in pairs if value is not NOT_SET}


def refused(keys: Iterable[Key], *, under: str = "") -> dict[str, str]:
    """The keys that [verl_overrides] may not set: ``under`` + path -> ``decided_by``."""
    return {under + key.path: key.decided_by for key in keys if key.decided_by is not None}
