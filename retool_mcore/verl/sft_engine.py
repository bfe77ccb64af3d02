"""The interface between SFT's loop and verl's training worker: batches in, Python floats out."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.workers.config import TrainingWorkerConfig

from retool_mcore.config import SftConfig
from retool_mcore.data.chat import TokenizedChat
from retool_mcore.model.shape import shape_of_hf_config
from retool_mcore.platforms.base import Platform
from retool_mcore.run.metrics import EXPERTS, PhaseTimer
from retool_mcore.verl.checkpoint import PendingSave, load_checkpoint, new_seed_if_relaid_out, save, start_save


class SftEngine:
    """One rank of the model under training.

    Every method is collective: all ranks call it in the same order, each with its shard of the
    batch. ``worker``: verl's TrainingWorker, after ``start``.
    """

    def __init__(self, worker: Any, config: SftConfig, platform: Platform) -> None:
        self.worker, self._config, self._platform = worker, config, platform
        self.dp_rank: int = worker.engine.get_data_parallel_rank()
        self.dp_size: int = worker.engine.get_data_parallel_size()
        self.shape = shape_of_hf_config(worker.model_config.hf_config)
        has_output = worker.engine.is_mp_src_rank_with_outputs() and self.dp_rank == 0
        flags: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(flags, has_output)
        self._source = flags.index(True)  # with pipeline parallelism the loss is not on rank 0

    def train_batch(self, sequences: Sequence[TokenizedChat]) -> dict[str, float]:
        """Run one update: forward, backward, gradient clipping, Adam, schedule.

        ``sequences``: this data-parallel rank's part of the global batch. Returns loss (nats per
        trained token over the global batch), grad_norm, lr, the counts of ``_pack``, the expert
        load, and memory_gib, the maximum over ranks. All ranks return the same values.
        """
        data, counts = self._pack(sequences)
        output = self.worker.train_batch(data)
        peaks_gib: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks_gib, self._platform.peak_memory_gib())
        metrics = self._share(output, ("loss", "grad_norm", "lr"), EXPERTS)
        return metrics | counts | {"memory_gib": max(peaks_gib)}

    def validation_loss(self, batches: Sequence[Sequence[TokenizedChat]]) -> float:
        """Loss in nats per trained token over all ``batches``; each is this rank's part."""
        total, tokens = 0.0, 0.0
        for sequences in batches:
            data, counts = self._pack(sequences)
            loss = self._share(self.worker.infer_batch(data), ("loss",))["loss"]
            total += loss * counts["loss_tokens"]
            tokens += counts["loss_tokens"]
        return total / tokens

    def save(self, folder: str, step: int) -> PendingSave | None:
        """Save a checkpoint. Raises CheckpointError.

        Returns the pending save if ``checkpoint.asynchronous`` is set, else None.
        """
        if self._config.checkpoint.asynchronous:
            return start_save(self.worker.engine, folder, step)
        save(self.worker.engine, folder, step)
        return None

    def load(self, checkpoint: Path) -> None:
        """Load weights, Adam moments, schedule and random states. Raises CheckpointError.

        With another TP or PP size, the random states are new.
        """
        engine = self.worker.engine
        load_checkpoint(engine, str(checkpoint / "actor"), new_seed=new_seed_if_relaid_out(engine, checkpoint))

    def _share(self, output: Any, names: Sequence[str], prefix: str | None = None) -> dict[str, float]:
        """Broadcast metrics, by ``names`` and by ``prefix``, from the rank that has the output."""
        from verl.utils import tensordict_utils as tu

        box: list[Any] = [None]
        if dist.get_rank() == self._source:
            metrics = tu.get(output, "metrics")
            wanted = [name for name in metrics if name in names or (prefix and name.startswith(prefix))]
            box[0] = {name: float(metrics[name]) for name in wanted}
        dist.broadcast_object_list(box, src=self._source)
        return box[0]

    def _pack(self, sequences: Sequence[TokenizedChat]) -> tuple[Any, dict[str, float]]:
        """Build this rank's TensorDict, and count tokens and FLOPs of the global batch.

        Collective over the data-parallel ranks. The counts are perf/total_num_tokens, loss_tokens
        and flops, the floating-point operations of one update.
        """
        engine = self.worker.engine
        own = ([len(s.token_ids) for s in sequences], sum(sum(s.loss_mask) for s in sequences))
        ranks: list[Any] = [None] * self.dp_size
        dist.all_gather_object(ranks, own, group=engine.get_data_parallel_group())
        lengths = [length for rank_lengths, _ in ranks for length in rank_lengths]
        return self._tensordict(sequences), {
            "perf/total_num_tokens": float(sum(lengths)),
            "loss_tokens": float(sum(trained for _, trained in ranks)),
            "flops": self.shape.train_flops(lengths, self._config.lora),
        }

    def _tensordict(self, sequences: Sequence[TokenizedChat]) -> Any:
        from verl.utils import tensordict_utils as tu
        from verl.utils.dataset.dataset_utils import DatasetPadMode

        def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        return tu.get_tensordict(
            tensor_dict={
                "input_ids": jagged([torch.tensor(s.token_ids, dtype=torch.int64) for s in sequences]),
                "position_ids": jagged([torch.arange(len(s.token_ids), dtype=torch.int64) for s in sequences]),
                "loss_mask": jagged([torch.tensor(s.loss_mask, dtype=torch.int64) for s in sequences]),
            },
            non_tensor_dict={
                "use_dynamic_bsz": True,
                "temperature": 1.0,
                "global_batch_size": self._config.train.global_batch,
                "pad_mode": DatasetPadMode.NO_PADDING,
                "pad_token_id": self.worker.model_config.tokenizer.pad_token_id,
            },
        )


def megatron_worker(config: SftConfig, worker_config: TrainingWorkerConfig) -> Any:
    """Build verl's worker with the run's Megatron model, optimizer and schedule."""
    from retool_mcore.verl.update_worker import RecomputingWorker, UpdateWorker

    worker_class = RecomputingWorker if config.memory.recompute == "auto" else UpdateWorker
    worker = worker_class(worker_config)
    start(worker)
    return worker


def start(worker: Any) -> None:
    """Set SFT's loss in verl's ``worker``, and build its model and optimizer."""
    from verl.workers.utils.losses import sft_loss

    worker.set_loss_fn(partial(sft_loss, config=None))
    worker.reset()


def time_optimizer(engine: Any, platform: Platform, timer: PhaseTimer) -> None:
    """Time the optimizer step of verl's ``engine`` separately, under the span "optimizer"."""
    step = engine.optimizer_step

    def timed_step() -> Any:
        platform.synchronize()
        with timer.span("optimizer"):
            grad_norm = step()
            platform.synchronize()
        return grad_norm

    engine.optimizer_step = timed_step
