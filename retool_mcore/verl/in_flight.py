"""Prompts over a restart: their names, and how many of them are in flight.

In the modes "partial_rollout" and "async" a checkpoint has verl's queue in it, with the prompts
that were fetched and not yet learnt from. A step that was broken off (verl/asked_to_end.py) has its
own prompts there as well, so the step that repeats it fetches none. It would otherwise have a batch
more in flight than the settings say, and every step after it, too.

In mode "sync" the engines get the prompts of the next step as soon as they have its weights. The
driver writes the metrics of the step before while they sample.
"""

from typing import Any

import numpy as np
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

TRAIN = "train"


class InFlightMixin(PPOTrainer):
    """Mixed in before one of verl's trainers."""

    _prompts_named = 0
    _has_fetched = False  # the coming step's prompts are in the queue already

    def prompts_restored(self) -> None:
        """Called when a checkpoint's queue is loaded; ``global_steps`` is the step before."""
        numbers = numbers_of_step(self.global_steps + 1)
        self._has_fetched = bool(numbers)
        self._prompts_named = max(numbers, default=-1) + 1

    def _add_batch_to_generate(self) -> None:
        if self._has_fetched:
            self._has_fetched = False
            return
        super()._add_batch_to_generate()

    def on_step_end(self) -> None:
        super().on_step_end()
        if self.trainer_mode == "sync" and self.global_steps < self.total_training_steps and not self._validates_now:
            self.global_steps += 1  # of which these prompts are
            try:
                self._add_batch_to_generate()
            finally:
                self.global_steps -= 1
            self._has_fetched = True

    @property
    def _validates_now(self) -> bool:
        """Whether a validation follows the step, which has the engines for itself."""
        every: int = self.config.trainer.test_freq
        return every > 0 and self.global_steps % every == 0

    def _fetch_one_gen_batch(self) -> Any:
        """verl's prompts, with names that a repeated run gives again.

        A name is the step that starts the prompt, and a count.
        """
        batch = super()._fetch_one_gen_batch()
        first = self._prompts_named
        self._prompts_named += len(batch)
        names = [f"{self.global_steps}-{number}" for number in range(first, self._prompts_named)]
        batch["uid"] = tu.get_tensordict({"uid": np.array(names, dtype=object)})["uid"]
        return batch


def numbers_of_step(step: int) -> list[int]:
    """The counts in the names of the queue's prompts that ``step`` has fetched."""
    items = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
    names = [name.split("-") for name, tag in items.items() if tag.get("is_prompt", False)]
    return [int(number) for first, number in names if int(first) == step]
