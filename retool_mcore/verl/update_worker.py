"""verl's training worker, with a learning-rate schedule that advances once per update.

This holds in SFT and in every mode of RL. verl 0.9.1 advances the schedule at the end of each batch
that the trainer sends: after all updates of a step in its synchronous and colocated trainers, after
each update in its separate one. Its first update uses step 0 of the schedule, where warm-up gives a
learning rate of 0.
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
KEEP_LOG_PROBS = "retool_keep_log_probs"  # bool: whether updates keep the log-probs of their forward passes
REAL_ROWS = "retool_real_rows"  # tuple of int: number of trajectories in each update, without padding


def avoid_zero_tokens(loss_function: Any, *, data: TensorDict, **rest: Any) -> Any:
    """Compute a micro-batch's loss, also if the micro-batch or the update has no token in its loss.

    Masked responses and padding rows can leave no token. verl divides by the update's number of
    tokens, so loss and gradient would be 0 / 0. verl also raises if it computes importance weights
    for a micro-batch without tokens. Here the loss of such a micro-batch is that of all its tokens
    times 0, so that all ranks run the same passes and report the same metrics.
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
    """Wrap verl's ``loss_function``; the engine calls the result for each micro-batch."""
    return partial(avoid_zero_tokens, partial(sum_over_tokens, loss_function))


class UpdateWorker(TrainingWorker):
    """Trains one model. Update u of a run, counted from 1, uses the schedule's learning rate at u.

    The metric ``lr`` is the rate of this update; verl reports that of the next update. Updates of a
    model with experts also report their load.

    ``log_probs``: with KEEP_LOG_PROBS, one jagged tensor [rows, T] for each update since the list
    was last cleared: log-probs of the sequences' tokens, from the update's forward pass. Empty on
    ranks without outputs.
    """

    _load: ExpertLoad | None = None
    _real_rows: tuple[int, ...] = ()  # of the step's remaining updates
    _room: torch.Tensor | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build model, optimizer and schedule, and advance the schedule to update 1.

        Reserves memory for Adam's states, unless the optimizer is offloaded to the host.
        """
        from retool_mcore.verl import lora  # imports Megatron, which the driver does not need

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
        gc.collect()  # frees unreachable tensors, which freeze would keep
        gc.freeze()  # else a full collection scans all imports: 0.5 s, in which all ranks wait for this one

    def free_room(self) -> None:
        """Free the reserved memory; call just before Adam's states are allocated or loaded."""
        self._room = None

    def _train_and_keep(self, data: TensorDict, loss_function: Any) -> Any:
        """Run the engine's train_batch and keep the log-probs, which verl's worker would drop."""
        self.free_room()
        output = self._engine_train_batch(data, loss_function=loss_of_micro_batch(loss_function))
        if tu.get(data, KEEP_LOG_PROBS, default=False) and "log_probs" in output.get("model_output", {}):
            self.log_probs.append(output["model_output"]["log_probs"])
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Run one update: forward, backward, gradient clipping, Adam, schedule.

        Returns metrics on the ranks that have the output, None on the others.
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
        """Run one forward pass: log-probs, values or the validation loss."""
        output = super().infer_batch(data)
        alive.sign()
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """Run the updates of a step. Means over responses exclude padding rows.

        Reports the last update's learning rate, the mean expert load of the updates, and means over
        the tokens of all updates. Returns None on ranks without outputs.
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
