"""verl's worker of one model under training, whose learning rate has one meaning in SFT and in every mode of RL.

verl 0.9.1 moves the schedule at the end of what it is handed: after all updates of a step in its synchronous and its
colocated trainer, after each update in its separate one, and its first update is made at step 0 of the schedule, which
under warm-up is a learning rate of 0.
"""

from __future__ import annotations

from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker


class UpdateWorker(TrainingWorker):
    """Update u of a run, counted from 1, is made with the schedule's learning rate at u.

    The metric ``lr`` is the one that the optimizer held in the update; verl's is the next one's.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build the model, the optimizer and the schedule, which stands one update ahead of those that are made."""
        super().reset()
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step(1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """One update: forward, backward, clip, Adam, schedule. Metrics on the ranks that have the output."""
        lr = float(self.engine.optimizer.param_groups[0]["lr"])
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        output = super().train_batch(data)
        if output is not None:
            tu.get(output, "metrics")["lr"] = lr
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """The updates of a step. Of their learning rates, the last is reported."""
        output = super().train_mini_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            metrics["lr"] = metrics["lr"][-1:]
        return output
