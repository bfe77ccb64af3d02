"""verl's worker of one model under training, whose learning rate has one meaning in SFT and in
every mode of RL.

verl 0.9.1 moves the schedule at the end of what it is handed: after all updates of a step in its
synchronous and its colocated trainer, after each update in its separate one, and its first update
is made at step 0 of the schedule, which under warm-up is a learning rate of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

KEEP_LOG_PROBS = "retool_keep_log_probs"  # in a batch's non-tensor data


class UpdateWorker(TrainingWorker):
    """Update u of a run, counted from 1, is made with the schedule's learning rate at u.

    The metric ``lr`` is the one that the optimizer held in the update; verl's is the next one's.

    ``log_probs``: of the step's last update that was made with KEEP_LOG_PROBS, what its forward
    pass gave each token of the sequences [rows, T], in the order of the batch; None on ranks
    without the output.
    """

    log_probs: torch.Tensor | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build the model, the optimizer and the schedule, which stands one update ahead of those
        that are made.
        """
        super().reset()
        self._engine_train_batch = self.engine.train_batch
        self.engine.train_batch = self._train_and_keep
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step(1)

    def _train_and_keep(self, data: TensorDict, loss_function: Any) -> Any:
        """The engine's own; verl's worker throws away what is neither loss nor metric of its
        output.
        """
        output = self._engine_train_batch(data, loss_function=loss_function)
        if tu.get(data, KEEP_LOG_PROBS, default=False):
            self.log_probs = output["model_output"].get("log_probs")
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """One update: forward, backward, clip, Adam, schedule. Metrics on the ranks that have the
        output.
        """
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
