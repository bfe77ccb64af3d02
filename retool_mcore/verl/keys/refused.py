"""The verl keys that [verl_overrides] may not set, because our settings control them.

Setting them directly would silently contradict the run's settings, which the sampler, the schedule
and the metrics use. The list is derived from this package's tables. Users may set keys for which we
only change verl's default.
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
# Prefix in verl's tree -> table of keys.
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
    """Refused keys -> what controls them; later tables win, as for the critic's learning rate."""
    return {path: setting for under, keys in tables for path, setting in refused(keys, under=under).items()}


SFT_KEYS, RL_KEYS = _derived(SFT_TABLES), _derived(RL_TABLES)
ENGINE_LOG_PROB_KEYS = refused(ENGINE_LOG_PROB)


def refuse(overrides: Mapping[str, Any], decided: Mapping[str, str], source: str) -> None:
    """Raise one ConfigError for all keys of [verl_overrides] that our settings control.

    ``decided``: verl's key -> our setting. Also refuses a table that contains such a key, and a key
    below one.
    """
    found = {key: setting for key in overrides if (setting := decided_by(key, decided))}
    if found:
        told = "; ".join(f"{key} = {overrides[key]!r}: {setting} decides it" for key, setting in found.items())
        raise ConfigError(f"{source}: [verl_overrides] refuses {told}. Leave the raw key out, and set what decides it.")


def decided_by(key: str, decided: Mapping[str, str]) -> str | None:
    """Our settings that control verl's ``key``, or None."""
    if key in decided:
        return decided[key]
    above = [ours for ours in decided if key.startswith(f"{ours}.")]
    if above:
        return decided[max(above, key=len)]
    below = {decided[ours]: None for ours in decided if ours.startswith(f"{key}.")}
    return " and ".join(below) or None
