"""One update by verl's training worker: loss, metrics, expert load, memory, schedule.

verl 0.9.1 advances the learning-rate schedule at the end of each batch that the trainer sends:
after all updates of a step in its synchronous and colocated trainers, after each update in its
separate one. Its first update uses step 0 of the schedule, where warm-up gives a learning rate of
0. Here the schedule advances once per update, in SFT and in every mode of RL.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import TrainingWorker

from retool_mcore.run import heartbeat
from retool_mcore.run.metrics import EXPERTS
from retool_mcore.verl.recompute import recompute_by_length, set_budget_of_each_batch

# In a batch's non-tensor data:
KEEP_LOG_PROBS = "retool_keep_log_probs"  # bool: whether updates keep the log-probs of their forward passes
REAL_ROWS = "retool_real_rows"  # tuple of int: number of trajectories in each update, without padding

LOSS_TOKENS = "loss_tokens"
MAX_OVER_MEAN = EXPERTS + "load_max_over_mean"
ADAM_MOMENTS = 2 * 4  # bytes per parameter, two float32 moments
_SUM = "sum_over_tokens/"
_PER_STEP = "rollout_corr/"  # verl/measure.py computes these once per step, over all rows
_REJECTED = "rollout_corr/rollout_rs_masked_fraction"


# ------------------------------------------------- the loss of a micro-batch


def avoid_zero_tokens(loss_function: Any, *, data: TensorDict, **rest: Any) -> Any:
    """Compute a micro-batch's loss, even if the micro-batch or the update has no token in the loss.

    Masked responses and padding rows can leave no token. verl divides by the update's number of
    tokens, so loss and gradient would be 0 / 0. verl also raises if it computes importance weights
    for a micro-batch without tokens. Here the loss of such a micro-batch is computed over all its
    tokens and multiplied by 0, so that all ranks run the same passes and report the same metrics.
    """
    if tu.get_non_tensor_data(data, key="batch_num_tokens", default=None) == 0:
        tu.assign_non_tensor(data, batch_num_tokens=1)
    mask = data.get("response_mask", None)
    if mask is None or mask.values().any():
        return loss_function(data=data, **rest)
    data = data.clone(recurse=False)
    data["response_mask"] = torch.ones_like(mask)
    loss, metrics = loss_function(data=data, **rest)
    zeros = {name: Metric(metric.aggregation, 0.0) for name, metric in metrics.items() if isinstance(metric, Metric)}
    return 0.0 * loss, metrics | zeros


def loss_of_micro_batch(loss_function: Any) -> Any:
    """Wrap verl's ``loss_function``; the engine calls the result for each micro-batch."""
    return partial(avoid_zero_tokens, partial(sum_over_tokens, loss_function))


def sum_over_tokens(loss_function: Callable[..., Any], *, data: TensorDict, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Compute verl's loss of a micro-batch, and turn each mean among its metrics into a sum.

    verl's losses report means over the tokens of a micro-batch, and its workers average these
    means. A metric would then depend on how responses are packed. The step divides these sums by
    its number of tokens. Adds LOSS_TOKENS, the number of tokens in the loss minus those that the
    loss rejected.
    """
    loss, metrics = loss_function(data=data, **rest)
    if not metrics:  # SFT's loss reports none
        return loss, metrics
    rejected = metrics[_REJECTED].aggregate() if _REJECTED in metrics else 0.0
    tokens = round(float(data["response_mask"].values().sum()) * (1 - rejected)) * data["dp_size"]
    sums: dict[str, Any] = {LOSS_TOKENS: _sum(tokens)}
    for name, metric in metrics.items():
        if isinstance(metric, Metric) and metric.aggregation != AggregationType.MEAN:
            sums[name] = metric
        elif not name.startswith(_PER_STEP):
            sums[_SUM + name] = _sum(tokens * (metric.aggregate() if isinstance(metric, Metric) else metric))
    return loss, sums


def _sum(value: float) -> Metric:
    """A metric that verl sums over micro-batches and averages over data-parallel ranks."""
    return Metric(AggregationType.SUM, float(value))


def divide_by_tokens(metrics: dict[str, Any]) -> None:
    """Replace the sums of a step's updates by means, in place. ``metrics``: name -> [updates]."""
    if LOSS_TOKENS not in metrics:
        return
    tokens = sum(metrics[LOSS_TOKENS])
    metrics[LOSS_TOKENS] = [tokens]
    for name in [name for name in metrics if name.startswith(_SUM)]:
        metrics[name.removeprefix(_SUM)] = [sum(metrics.pop(name)) / max(tokens, 1)]


# ------------------------------------------------- experts and memory


class ExpertLoad:
    """Counts how often each router of a Megatron model chooses each expert in training passes.

    ``chunks``: this rank's model chunks; ``config``: the model's TransformerConfig.
    """

    def __init__(self, chunks: Sequence[Any], config: Any) -> None:
        self._counts_LE = torch.zeros(
            config.num_layers, config.num_moe_experts, dtype=torch.int64, device=get_device_name()
        )
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith(".mlp.router"):  # the module's name in Megatron-Bridge's weight mapping
                    module.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Skips the first pass of a recomputed layer, which runs without gradients.
        if torch.is_grad_enabled():
            self._counts_LE[router.layer_number - 1] += output[1].sum(dim=0)

    def pop_metrics(self) -> dict[str, float]:
        """``expert_load_metrics`` of the passes since the last call. Collective.

        Exactly one rank counts each token of a layer: data, context and sequence parallelism divide
        the tokens, pipeline parallelism divides the layers, and each router chooses among all
        experts.
        """
        dist.all_reduce(self._counts_LE)
        metrics = expert_load_metrics(self._counts_LE.cpu())
        self._counts_LE.zero_()
        return metrics


def expert_load_metrics(counts_LE: torch.Tensor) -> dict[str, float]:
    """The metrics ``experts/*`` of run/metric_table.py.

    ``counts_LE``: int64 [L, E], how often each expert was chosen; 0 in layers without experts.
    """
    layers = counts_LE.sum(dim=1).nonzero().flatten().tolist()
    if not layers:
        return {}
    chosen = counts_LE[layers].double()
    ratios = (chosen.amax(dim=1) / chosen.mean(dim=1)).tolist()
    return {
        MAX_OVER_MEAN: sum(ratios) / len(ratios),
        EXPERTS + "unused": (chosen == 0).double().mean().item(),
        **{f"{MAX_OVER_MEAN}/layer_{layer}": ratio for layer, ratio in zip(layers, ratios, strict=True)},
    }


def reserve_adam_memory(optimizer: Any) -> torch.Tensor | None:
    """Allocate as much memory as Megatron's optimizer will allocate on this rank at its first step.

    SGLang starts before that step and chooses its size from the free memory. Without the
    reservation, Adam's states (43 GiB for 7 B parameters on one H200) would take memory that the
    engine needs when it wakes up. Free the tensor before that step, so that torch's allocator
    reuses its memory for the states.

    Returns:
        uint8 [bytes] on the device of the states; None if the optimizer will allocate none there.
    """
    num_bytes, device = 0, None
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None or part.config.optimizer_cpu_offload:
            continue
        parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:  # the distributed optimizer has only this rank's shards
            if not part.optimizer.state.get(parameter):
                num_bytes += bytes_of_states(part.config) * parameter.numel()
                device = parameter.device
    return torch.empty(num_bytes, dtype=torch.uint8, device=device) if num_bytes else None


def bytes_of_states(config: Any) -> int:
    """Bytes per parameter of the states that the first step allocates, per Megatron's config.

    Includes master weights only if the optimizer allocates them in that step. Without the
    precision-aware optimizer, or with use_precision_aware_optimizer_no_fp8_or_ds_fp8 off, Megatron
    allocates them at the start.
    """
    if not config.use_precision_aware_optimizer:
        return ADAM_MOMENTS
    moments = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
    if not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return moments
    master = torch.int16 if config.store_param_remainders else config.main_params_dtype
    return moments + master.itemsize


# ------------------------------------------------- the worker


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
    _reserved: torch.Tensor | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build model, optimizer and schedule, and advance the schedule to update 1.

        Reserves memory for Adam's states, unless the optimizer is offloaded to the host.
        """
        from retool_mcore.verl import lora  # imports Megatron, which the driver does not need

        lora.attach(self.engine)
        super().reset()
        if not self.engine_config.forward_only and not self.engine_config.optimizer_offload:
            self._reserved = reserve_adam_memory(self.engine.optimizer)
        if not self.engine_config.forward_only and self.engine.tf_config.num_moe_experts:
            self._load = ExpertLoad(self.engine.module, self.engine.tf_config)
        self.log_probs: list[torch.Tensor] = []
        self._engine_train_batch = self.engine.train_batch
        self.engine.train_batch = self._train_and_keep
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step(1)
        gc.collect()  # frees unreachable tensors, which freeze would keep
        gc.freeze()  # else a full collection scans all imports: 0.5 s, while all ranks wait for this one

    def free_reserved_memory(self) -> None:
        """Free the reserved memory; call just before Adam's states are allocated or loaded."""
        self._reserved = None

    def _train_and_keep(self, data: TensorDict, loss_function: Any) -> Any:
        """Run the engine's train_batch and keep the log-probs, which verl's worker would drop."""
        self.free_reserved_memory()
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
        heartbeat.send()
        load = self._load.pop_metrics() if self._load is not None else {}
        if output is not None:
            tu.get(output, "metrics").update(load, lr=lr)
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """Run one forward pass: log-probs, values or the validation loss."""
        output = super().infer_batch(data)
        heartbeat.send()
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


class RecomputingWorker(UpdateWorker):
    """The worker with ``memory.recompute = "auto"``, in SFT and for each role of RL."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        super().reset()
        set_budget_of_each_batch(self.engine)
        if not self.engine_config.forward_only:
            recompute_by_length(self)
