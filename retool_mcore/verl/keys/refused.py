"""Raw verl keys that [verl_overrides] may not set, because a setting of ours decides them.

If they were set raw, they would silently contradict the run's own settings, from which the sampler,
the schedule and the metrics are made. They are derived from the tables of this folder. Keys for
which our mapping only changes the default may be set.
"""

from collections.abc import Mapping
from typing import Any

from retool_mcore.errors import ConfigError
from retool_mcore.verl.keys import trainer
from retool_mcore.verl.keys.algorithm import ALGORITHM, ENGINE_LOG_PROB
from retool_mcore.verl.keys.engine import MEGATRON, MODEL, OPTIMIZER, SFT_BATCHES
from retool_mcore.verl.keys.key import Key, refused
from retool_mcore.verl.keys.rollout import ASYNC, ROLLOUT, SAMPLER, UNDER

ACTOR, REFERENCE, CRITIC = "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic."
# Each table of keys, and the path in verl's tree that it stands under.
SFT_TABLES: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("engine.", SFT_BATCHES),
    ("engine.", MEGATRON),
    ("optim.", OPTIMIZER),
    ("model.", MODEL),
)
RL_TABLES: tuple[tuple[str, tuple[Key, ...]], ...] = (
    *((f"{role}megatron.", MEGATRON) for role in (ACTOR, REFERENCE, CRITIC)),
    *((f"{role}optim.", OPTIMIZER) for role in (ACTOR, CRITIC)),
    ("actor_rollout_ref.model.", MODEL),
    (ACTOR, trainer.ACTOR),
    (UNDER, ROLLOUT),
    *(("", table) for table in (ALGORITHM, SAMPLER, ASYNC, trainer.CRITIC, trainer.REWARD, trainer.DATA)),
    *(("", table) for table in (trainer.TRAINER, trainer.RAY, trainer.RESUME)),
)


def _derived(tables: tuple[tuple[str, tuple[Key, ...]], ...]) -> dict[str, str]:
    """What the last table that has a key says of it: the critic's learning rate is its own."""
    return {path: setting for under, keys in tables for path, setting in refused(keys, under=under).items()}


SFT_KEYS, RL_KEYS = _derived(SFT_TABLES), _derived(RL_TABLES)
ENGINE_LOG_PROB_KEYS = refused(ENGINE_LOG_PROB)


def refuse(overrides: Mapping[str, Any], decided: Mapping[str, str], source: str) -> None:
    """Raise one ConfigError for all keys of [verl_overrides] that are in ``decided``.

    ``decided`` maps a key to our setting. A table that contains such a key, or a key below it, is
    refused as well: it is the same value.
    """
    found = {key: setting for key in overrides if (setting := decided_by(key, decided))}
    if found:
        told = "; ".join(f"{key} = {overrides[key]!r}: {setting} decides it" for key, setting in found.items())
        raise ConfigError(f"{source}: [verl_overrides] refuses {told}. Leave the raw key out, and set what decides it.")


def decided_by(key: str, decided: Mapping[str, str]) -> str | None:
    """The settings that decide a raw key, or None."""
    if key in decided:
        return decided[key]
    above = [ours for ours in decided if key.startswith(f"{ours}.")]
    if above:
        return decided[max(above, key=len)]
    below = {decided[ours]: None for ours in decided if ours.startswith(f"{key}.")}
    return " and ".join(below) or None
