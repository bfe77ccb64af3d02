"""verl's worker that trains one model, with one meaning of the learning rate.

The meaning is the same in SFT and in every mode of RL. verl 0.9.1 advances the schedule at the end
of each batch that it is handed: after all updates of a step in its synchronous and colocated
trainers, after each update in its separate one. Its first update uses step 0 of the schedule, which
under warm-up is a learning rate of 0.
"""

import gc
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.engine_workers import TrainingWorker

from retool_mcore.run import alive
from retool_mcore.run.metrics import EXPERTS
from retool_mcore.verl import optimizer_room
from retool_mcore.verl.expert_load import ExpertLoad
from retool_mcore.verl.token_means import divide_by_tokens, sum_over_tokens

# In a batch's non-tensor data:
KEEP_LOG_PROBS = "retool_keep_log_probs"  # whether updates keep the log-probabilities of their forward passes
REAL_ROWS = "retool_real_rows"  # of each update, the rows that are trajectories and not padding


def avoid_zero_tokens(loss_function: Any, *, data: TensorDict, **rest: Any) -> Any:
    """The loss of a micro-batch that may have no token in its loss, as may its whole update.

    Masks of whole responses leave such, and so do rows that only pad a batch. verl divides by the
    update's number of tokens, and the loss and its gradient would be 0 / 0. Of a micro-batch
    without a token verl takes no weights: it raises. Here its loss is that of all its tokens times
    0, so that ranks go through the same passes and report the same metrics.
    """
    if tu.get_non_tensor_data(data, key="batch_num_tokens", default=None) == 0:
        tu.assign_non_tensor(data, batch_num_tokens=1)
    mask = data.get("response_mask", None)
    if mask is None or mask.values().any():
        return loss_function(data=data, **rest)
    data = data.clone(recurse=False)
    data["response_mask"] = torch.ones_like(mask)
    loss, metrics = loss_function(data=data, **rest)
    nothing = {name: Metric(metric.aggregation, 0.0) for name, metric in metrics.items() if isinstance(metric, Metric)}
    return 0.0 * loss, metrics | nothing


def loss_of_micro_batch(loss_function: Any) -> Any:
    """What the engine calls for each micro-batch in place of verl's ``loss_function``."""
    return partial(avoid_zero_tokens, partial(sum_over_tokens, loss_function))


class UpdateWorker(TrainingWorker):
    """Update u of a run, counted from 1, uses the schedule's learning rate at u.

    The metric ``lr`` is the rate that the optimizer used in the update; verl's is the next
    update's.

    ``log_probs``: with KEEP_LOG_PROBS, of each update since they were taken, the log-probabilities
    [rows, T] of its sequences' tokens from its forward pass. Empty on ranks without the output.

    The update of a model with experts has metrics of their load.
    """

    _load: ExpertLoad | None = None
    _real_rows: tuple[int, ...] = ()  # of the step's updates that are still to come
    _room: torch.Tensor | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build model, optimizer and schedule; the schedule stands one update ahead.

        What does not move to the host keeps room for Adam's states.
        """
        from retool_mcore.verl import lora  # imports Megatron, which a driver has no use for

        lora.attach(self.engine)
        super().reset()
        if not self.engine_config.forward_only and not self.engine_config.optimizer_offload:
            self._room = optimizer_room.reserve_adam_memory(self.engine.optimizer)
        if not self.engine_config.forward_only and self.engine.tf_config.num_moe_experts:
            self._load = ExpertLoad(self.engine.module, self.engine.tf_config)
        self.log_probs: list[torch.Tensor] = []
        self._engine_train_batch = self.engine.train_batch
        self.engine.train_batch = self._train_and_keep
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step(1)
        gc.collect()  # a tensor that garbage holds would stay
        gc.freeze()  # a full collection of all that was imported takes 0.5 s, for which every rank waits

    def free_room(self) -> None:
        """Leave the room to Adam's states, which the next call makes or reads."""
        self._room = None

    def _train_and_keep(self, data: TensorDict, loss_function: Any) -> Any:
        """The engine's train_batch; keeps the log-probabilities.

        verl's worker keeps only loss and metrics of the output.
        """
        self.free_room()
        output = self._engine_train_batch(data, loss_function=loss_of_micro_batch(loss_function))
        if tu.get(data, KEEP_LOG_PROBS, default=False) and "log_probs" in output.get("model_output", {}):
            self.log_probs.append(output["model_output"]["log_probs"])
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """One update: forward, backward, clip, Adam, schedule.

        Returns metrics on the ranks that have the output.
        """
        lr = float(self.engine.optimizer.param_groups[0]["lr"])
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        if self._real_rows:
            rows, *rest = self._real_rows
            self._real_rows = tuple(rest)
            tu.assign_non_tensor(data, global_batch_size=rows)
        output = super().train_batch(data)
        alive.sign()
        load = self._load.take() if self._load is not None else {}
        if output is not None:
            tu.get(output, "metrics").update(load, lr=lr)
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """One pass without an update: log-probabilities, values or a validation's loss."""
        output = super().infer_batch(data)
        alive.sign()
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """The updates of a step. Means over responses are over trajectories, not padding rows.

        Reports the learning rate of the last one, the mean load of the experts, and means over the
        tokens of all of them.
        """
        self._real_rows = tu.pop(data, REAL_ROWS, default=())
        output = super().train_mini_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            metrics["lr"] = metrics["lr"][-1:]
            for name in [name for name in metrics if name.startswith(EXPERTS)]:
                metrics[name] = [sum(metrics[name]) / len(metrics[name])]
            divide_by_tokens(metrics)
        return output
