"""verl's training worker as SFT's loop sees it: batches in, plain numbers out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from retool_mcore.config import SftConfig
from retool_mcore.data.chat import Rendered
from retool_mcore.model.activations import token_memory
from retool_mcore.model.shape import ModelShape, shape_of_config
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.engine_patches import MICRO_BATCH_PATCH
from retool_mcore.run.metrics import EXPERTS, PhaseTimer, memory_by_rank
from retool_mcore.verl.checkpoint import PendingSave, load_checkpoint, save, start_save
from retool_mcore.verl.keys.sft import sft_worker_config
from retool_mcore.verl.recompute import recompute_long_micro_batches
from retool_mcore.verl.sft_batches import Packer


class SftEngine:
    """One rank of the model under training.

    Every method is collective: all ranks call it in the same order, with their own shard of the
    batch. ``worker`` is verl's, with its engine built.
    """

    def __init__(self, worker: Any, config: SftConfig, platform: Platform) -> None:
        self.worker, self._config, self._platform = worker, config, platform
        self.dp_rank: int = worker.engine.get_data_parallel_rank()
        self.dp_size: int = worker.engine.get_data_parallel_size()
        self.shape = model_shape(worker)
        self._packer = Packer(config, self.shape, worker.engine, worker.model_config.tokenizer.pad_token_id)
        has_output = worker.engine.is_mp_src_rank_with_outputs() and self.dp_rank == 0
        flags: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(flags, has_output)
        self._source = flags.index(True)  # with pipeline parallelism the loss is not on rank 0

    def train_batch(self, sequences: Sequence[Rendered]) -> dict[str, float]:
        """One update: forward, backward, clip, Adam, schedule.

        ``sequences`` is this rank's part of the global batch. Returns loss (nats per trained token
        over the global batch), grad_norm, lr, tokens, loss_tokens, flops, the load of experts, and
        the peak memory of every rank. All ranks return the same values.
        """
        data, counts = self._packer.pack(sequences)
        output = self.worker.train_batch(data)
        return self._share(output, ("loss", "grad_norm", "lr"), EXPERTS) | counts | self._memory()

    def _memory(self) -> dict[str, float]:
        peaks_gib: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(peaks_gib, self._platform.peak_memory_gib())
        return memory_by_rank(peaks_gib)

    def validation_loss(self, batches: Sequence[Sequence[Rendered]]) -> float:
        """Nats per trained token over all batches; each holds this rank's part."""
        total, tokens = 0.0, 0.0
        for sequences in batches:
            data, counts = self._packer.pack(sequences)
            loss = self._share(self.worker.infer_batch(data), ("loss",))["loss"]
            total += loss * counts["loss_tokens"]
            tokens += counts["loss_tokens"]
        return total / tokens

    def save(self, folder: str, step: int) -> PendingSave | None:
        """Save a checkpoint.

        With ``checkpoint.asynchronous`` returns the save in progress, else None.
        """
        if self._config.checkpoint.asynchronous:
            return start_save(self.worker.engine, folder, step)
        save(self.worker.engine, folder, step)
        return None

    def load(self, folder: str, *, new_seed: int | None = None) -> None:
        """Load weights, Adam moments, schedule and random states. Raises CheckpointError.

        With ``new_seed`` the random states start afresh.
        """
        load_checkpoint(self.worker.engine, folder, new_seed=new_seed)

    def _share(self, output: Any, names: Sequence[str], prefix: str | None = None) -> dict[str, float]:
        """The source rank's metrics, those with ``prefix`` too, broadcast to every rank."""
        from verl.utils import tensordict_utils as tu

        box: list[Any] = [None]
        if dist.get_rank() == self._source:
            metrics = tu.get(output, "metrics")
            wanted = [name for name in metrics if name in names or (prefix and name.startswith(prefix))]
            box[0] = {name: float(metrics[name]) for name in wanted}
        dist.broadcast_object_list(box, src=self._source)
        return box[0]


def megatron_worker(config: SftConfig, platform: Platform) -> Any:
    """verl's worker with the run's model on Megatron, its optimizer and its schedule."""
    from retool_mcore.verl.update_worker import UpdateWorker

    worker = UpdateWorker(sft_worker_config(config, platform))
    start(worker)
    if config.memory.recompute == "auto":
        MICRO_BATCH_PATCH.apply()
        fused = config.memory.fused_cross_entropy
        rest, input_share = token_memory(model_shape(worker), fused_cross_entropy=fused)
        recompute_long_micro_batches(
            worker.engine.module, config.train.micro_batch_tokens, rest=rest, input_share=input_share
        )
    return worker


def start(worker: Any) -> None:
    """Give verl's ``worker`` SFT's loss, and let it build its model and optimizer."""
    from verl.workers.utils.losses import sft_loss

    worker.set_loss_fn(partial(sft_loss, config=None))
    worker.reset()


def model_shape(worker: Any) -> ModelShape:
    return shape_of_config(worker.model_config.hf_config.get_text_config().to_dict())


def time_optimizer(engine: Any, platform: Platform, timer: PhaseTimer) -> None:
    """Time the optimizer of verl's ``engine`` by itself; its worker runs an update in one call."""
    step = engine.optimizer_step

    def timed_step() -> Any:
        platform.synchronize()
        with timer.span("optimizer"):
            grad_norm = step()
            platform.synchronize()
        return grad_norm

    engine.optimizer_step = timed_step
