"""An RL run that is asked to end (run/ending.py) breaks its step off, or finishes it, and saves.

Until its first update a step has changed nothing but the engines' requests: the weights are those
of the step before, and what the data loader gave out is asked for again. From then on the step is
finished and saved before its weights go to the engines.

Where prompts are in flight over steps, they are saved in verl's queue, and the loader is not set
back. A batch that was sampled has left the queue, so there a step is finished from then on.
"""

import copy
from pathlib import Path
from typing import Any

import torch

from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.ending import Ended, Ending
from retool_mcore.run.saving import Saver
from retool_mcore.verl.engines import EnginesMixin


class BrokenOff(Exception):
    """The step ends before its first update."""


class EndingMixin(EnginesMixin):
    """Mixed in before one of verl's trainers; ``_run`` has the run's settings."""

    _saver: Saver
    _ending: Ending | None = None
    _sampling = False
    _data_state: Any = None  # of the data loader, at the end of the last step
    _broken_off = False

    def fit(self, agent_loop_manager: Any) -> None:
        with Ending(self._run.checkpoint.grace_s) as ending:
            self._ending = ending
            try:
                super().fit(agent_loop_manager)
            except BrokenOff:
                self._save_step_before()
                raise Ended(ending.asked, self._saver.what_is_kept()) from None

    def on_init_end(self) -> None:
        super().on_init_end()
        restart_dead = self.replay_buffer.while_waiting

        def look() -> None:
            if self._sampling:
                self._break_off_if_asked()
            restart_dead()

        self.replay_buffer.while_waiting = look

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self._sampling = True
        self._break_off_if_asked()  # a batch that is ready is not waited for

    def on_sample_end(self) -> None:
        self._sampling = False
        super().on_sample_end()

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._break_off_if_asked()
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self.use_critic:
            self._break_off_if_asked()
        return super()._update_actor(batch, metrics)

    def on_step_end(self) -> None:
        if self._ending is not None:
            if self.trainer_mode == "sync":  # in other modes prompts in flight are saved, too
                self._data_state = copy.deepcopy(self.train_dataloader.state_dict())
            if self._ending.asked:
                self._save(self.global_steps)
        super().on_step_end()

    def _break_off_if_asked(self) -> None:
        if self._ending is None or not self._ending.asked or self.local_trigger_step > 0:
            return
        if self._sampling or self.trainer_mode == "sync":  # the step can be given its prompts again
            raise BrokenOff

    def _save_step_before(self) -> None:
        if self._sampling and not self._run.rollout.gpus:  # the save takes the devices that sampling has
            syncs: Any = self.checkpoint_manager
            syncs.abort_replicas()
            self.on_sample_end()
        self.global_steps -= 1
        self._broken_off = True
        self._save(self.global_steps)
        self._saver.wait()

    def _save(self, step: int) -> None:
        """Save the step, unless it is saved or the run keeps nothing."""
        saved = [each.step for each in complete_checkpoints(self._run.run.dir / "checkpoints")]
        if step and step not in (*saved, self._saver.begun) and self._run.saved_every:
            self._saver.save(step)

    def write_data_state(self, folder: Path) -> None:
        """After verl's own save: where the loader stood when the step before had ended."""
        if self._broken_off and self._data_state is not None:
            torch.save(self._data_state, folder / "data.pt")
