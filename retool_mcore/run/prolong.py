"""Whether a run may go on to another number of steps: its earlier rates must stay what they were.

A checkpoint brings its schedule along. The steps after it have the rate at which it has ended.
"""

from math import ceil
from pathlib import Path

from retool_mcore.config import RunConfig


def refuses(config: RunConfig, saved_step: int, before: int, path: Path) -> str:
    """Why a run to ``before`` steps may not go on from ``saved_step``; "" if it may.

    The words say what to do.
    """
    o, now = config.optim, config.num_steps
    said = f"train.steps was {before}, now {now}"
    fresh = (
        f"For a schedule over more steps start a new run from this one's weights: retool export {path} --to FOLDER, "
        "model.path = FOLDER and another run.name"
    )
    if o.schedule == "constant":
        rising = ceil(o.warmup_fraction * max(before, now))
        if saved_step >= rising:
            return ""
        return (
            f"{said}: the warm-up of {o.warmup_fraction:g} of all steps is not over at step {saved_step}, and would "
            f"have risen otherwise. Go on with train.steps = {before} beyond step {rising} first"
        )
    if saved_step < before:
        return (
            f'{said}: optim.schedule = "{o.schedule}" falls over all steps, so the rates of the {saved_step} steps '
            f"made would have been others. Go on with train.steps = {before} to its end first; more steps then have "
            f"the rate optim.min_lr. {fresh}"
        )
    if not o.min_lr:
        return (
            f"{said}: the schedule has ended at optim.min_lr = 0, at which nothing is learnt. Set optim.min_lr to the "
            f"rate of the further steps. {fresh}"
        )
    return ""


def words(config: RunConfig) -> str:
    """What is to be said of the rate of a run that goes on after the end of its schedule, or ""."""
    if config.optim.schedule == "constant":
        return ""
    return f"the schedule has ended, and the rate stays at optim.min_lr = {config.optim.min_lr:g}"
