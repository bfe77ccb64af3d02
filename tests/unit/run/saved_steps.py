"""Checkpoints of a run that has no model: saved by its Saver, read back by their steps."""

from collections.abc import Callable

from retool_mcore.config import SftConfig
from retool_mcore.run import checkpoint, saving


def save_steps(write_model: Callable[[str, int], None], config: SftConfig, *steps: int) -> None:
    with saving.Saver(config, write_model) as saver:
        for step in steps:
            saver.save(step)


def steps(config: SftConfig) -> list[int]:
    return [saved.step for saved in checkpoint.complete_checkpoints(config.run.dir / "checkpoints")]
