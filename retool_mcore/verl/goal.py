"""What a run aims at, in verl's trainer: the best checkpoint, early stop, the curriculum.

The rules are in run/best.py and data/curriculum.py; this mixin brings them what verl knows.
"""

from typing import Any

from omegaconf import open_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from retool_mcore.config import RlConfig
from retool_mcore.data.curriculum import SolveRateOrder
from retool_mcore.run.best import BestKeeper


class BestAndCurriculum(PPOTrainer):
    """Mixed in before one of verl's trainers; ``_run`` has the run's settings."""

    _run: RlConfig
    _best: BestKeeper
    validated: dict[str, Any]  # the last validation's metrics; of the start, when the first step begins
    _order: SolveRateOrder | None = None

    def _init_dataloader(self) -> None:
        """verl's loaders, with the curriculum's order in the place of verl's own.

        Sampler and batch size are arguments of a loader, so the loader is made anew.
        """
        super()._init_dataloader()
        data, loader = self._run.data, self.train_dataloader
        if data.curriculum == 1:
            return
        self._order = SolveRateOrder(
            len(self.train_dataset),
            seed=self._run.run.seed,
            floor=data.curriculum,
            apart=self._run.train.prompts_per_step,
        )
        self.train_dataloader = StatefulDataLoader(
            dataset=self.train_dataset,
            batch_size=loader.batch_size,
            num_workers=0,
            drop_last=True,
            collate_fn=loader.collate_fn,
            sampler=self._order,
        )
        self.replay_buffer.observe = self._order.observe

    def resume_best(self, step: int) -> None:
        """Continue from ``step``: its best step, and its validation anew if a kill took that.

        Called when the data loader's state is loaded; the curriculum's comes with it.
        """
        self._best = BestKeeper(self._run, step)
        if self._order is not None:
            self.train_dataloader_it = iter(self.train_dataloader)  # loads the state now, not at the first batch
        self.validated = {}
        with open_dict(self.config):
            self.config.trainer.val_before_train = self._best.lacks(step) or (self._run.validation.before and step == 0)

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        self.validated = {**metrics, **self.replay_buffer.val_metrics}
        self._best.validated(self.global_steps, self.validated)
        return metrics

    def on_train_begin(self) -> None:
        self.replay_buffer.val_metrics = {}  # if there are any, they are not of the step that comes
        super().on_train_begin()
        self.stop_without_progress(self.global_steps - 1)

    def stop_without_progress(self, step: int) -> None:
        """After ``step``: no further one, if best.patience is spent."""
        if self._best.given_up:
            self.total_training_steps = step

    def goal_metrics(self, validated: bool) -> dict[str, Any]:
        """The ``best/`` metrics of a step that was validated, and those of the curriculum."""
        found = self._best.metrics() if validated else {}
        return found | (self._order.metrics() if self._order is not None else {})
