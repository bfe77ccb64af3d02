"""verl's TrainingWorker on a Megatron engine for the SFT loop: batches in, plain numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.config import SftConfig
from retool_mcore.data.chat import Rendered
from retool_mcore.errors import CheckpointError
from retool_mcore.model.activations import token_memory
from retool_mcore.model.shape import of_config
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.engine_patches import MICRO_BATCH_PATCH
from retool_mcore.run.metrics import PhaseTimer, memory_by_rank
from retool_mcore.verl.async_save import PendingSave, failed_write_is_told, load_checkpoint, start_save
from retool_mcore.verl.keys.sft import sft_worker_config
from retool_mcore.verl.recompute import recompute_long_micro_batches, set_budget


class SftEngine:
    """One rank of the model under training.

    Every method is collective: all ranks call it in the same order, with their own shard of the
    batch.
    """

    def __init__(self, config: SftConfig, platform: Platform, timer: PhaseTimer) -> None:
        from verl.workers.utils.losses import sft_loss

        from retool_mcore.verl.update_worker import UpdateWorker

        self._worker = UpdateWorker(sft_worker_config(config, platform))
        self._worker.set_loss_fn(partial(sft_loss, config=None))
        self._worker.reset()
        self._platform = platform
        self._shape = of_config(self._worker.model_config.hf_config.get_text_config().to_dict())
        self._time_optimizer(timer)
        self._config = config
        self.dp_rank: int = self._worker.engine.get_data_parallel_rank()
        self.dp_size: int = self._worker.engine.get_data_parallel_size()
        self.hidden_size: int = self._worker.model_config.hf_config.get_text_config().hidden_size
        has_output = self._worker.engine.is_mp_src_rank_with_outputs() and self.dp_rank == 0
        flags: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(flags, has_output)
        self._source = flags.index(True)  # with pipeline parallelism the loss is not on rank 0
        if config.memory.recompute == "auto":
            MICRO_BATCH_PATCH.apply()
            rest, input_share = token_memory(self._shape, fused_cross_entropy=config.memory.fused_cross_entropy)
            recompute_long_micro_batches(
                self._worker.engine.module, config.train.micro_batch_tokens, rest=rest, input_share=input_share
            )

    def train_batch(self, sequences: Sequence[Rendered]) -> dict[str, float]:
        """One update: forward, backward, clip, Adam, schedule.

        ``sequences`` is this rank's part of the global batch. Returns loss (nats per trained token
        over the global batch), grad_norm, lr, tokens, loss_tokens, flops, and the peak memory of
        every rank. All ranks return the same values.
        """
        data, counts = self._tensordict(sequences)
        output = self._worker.train_batch(data)
        return self._share(output, ("loss", "grad_norm", "lr")) | counts | self._memory()

    def _memory(self) -> dict[str, float]:
        peaks_gib: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks_gib, self._platform.peak_memory_gib())
        return memory_by_rank(peaks_gib)

    def _time_optimizer(self, timer: PhaseTimer) -> None:
        """Give the optimizer a timer span; verl's worker runs a whole update in one call."""
        engine, platform = self._worker.engine, self._platform
        step = engine.optimizer_step

        def timed_step() -> Any:
            platform.synchronize()
            with timer.span("optimizer"):
                grad_norm = step()
                platform.synchronize()
            return grad_norm

        engine.optimizer_step = timed_step

    def validation_loss(self, batches: Sequence[Sequence[Rendered]]) -> float:
        """Nats per trained token over all batches; each holds this rank's part."""
        total, tokens = 0.0, 0.0
        for sequences in batches:
            data, counts = self._tensordict(sequences)
            loss = self._share(self._worker.infer_batch(data), ("loss",))["loss"]
            total += loss * counts["loss_tokens"]
            tokens += counts["loss_tokens"]
        return total / tokens

    def save(self, folder: str, step: int) -> PendingSave | None:
        """Save a checkpoint.

        With ``checkpoint.asynchronous`` returns the save in progress, else None.
        """
        if self._config.checkpoint.asynchronous:
            return start_save(self._worker.engine, folder, step)
        with failed_write_is_told(folder):
            self._worker.engine.save_checkpoint(local_path=folder, global_step=step)
        return None

    def load(self, folder: str, *, new_seed: int | None = None) -> None:
        """Load weights, Adam moments, schedule and random states. Raises CheckpointError.

        With ``new_seed`` the random states start afresh.
        """
        try:
            load_checkpoint(self._worker.engine, folder, new_seed=new_seed)
        except (RuntimeError, OSError, EOFError, ValueError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} cannot be loaded: {type(error).__name__}: {str(error)[:500]}. "
                "Move it away to resume from the one before it."
            ) from error

    def _tensordict(self, sequences: Sequence[Rendered]) -> tuple[Any, dict[str, float]]:
        from tensordict.tensorclass import NonTensorData
        from verl.utils import tensordict_utils as tu
        from verl.utils.dataset.dataset_utils import DatasetPadMode

        def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        data = tu.get_tensordict(
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
                "pad_token_id": self._worker.model_config.tokenizer.pad_token_id,
            },
        )
        lengths: list[Any] = [None] * self.dp_size
        mine = ([len(s.token_ids) for s in sequences], sum(sum(s.loss_mask) for s in sequences))
        dist.all_gather_object(lengths, mine, group=self._worker.engine.get_data_parallel_group())
        all_lengths = [length for rank_lengths, _ in lengths for length in rank_lengths]
        tu.assign_non_tensor(data, global_token_num=NonTensorData(all_lengths))
        if self._config.memory.recompute == "auto":
            by_rank = [rank_lengths for rank_lengths, _ in lengths]
            set_budget(data, by_rank, self._config.train.micro_batch_tokens, self._config.parallel.cp)
        counts = {
            "tokens": float(sum(all_lengths)),
            "loss_tokens": float(sum(trained for _, trained in lengths)),
            "flops": self._shape.train_flops(all_lengths),
        }
        return data, counts

    def _share(self, output: Any, names: Sequence[str]) -> dict[str, float]:
        """The source rank's metrics, broadcast to every rank."""
        from verl.utils import tensordict_utils as tu

        box: list[Any] = [None]
        if dist.get_rank() == self._source:
            metrics = tu.get(output, "metrics")
            box[0] = {name: float(metrics[name]) for name in names if name in metrics}
        dist.broadcast_object_list(box, src=self._source)
        return box[0]
