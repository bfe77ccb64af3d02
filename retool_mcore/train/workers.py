"""verl's Ray workers that train: checkpoints beside the training, read onto another layout; recomputation as needed."""

from __future__ import annotations

from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from retool_mcore.activations import token_memory
from retool_mcore.config import Memory
from retool_mcore.train.engine_checkpoint import PendingSave, failed_write_is_told, load_checkpoint, start_save
from retool_mcore.train.recompute import recompute_long_micro_batches, set_budget_of_each_batch


class _Saving:
    """Mixed in before one of verl's workers. All methods run on every rank of the role."""

    _pending: PendingSave | None = None
    _new_seed: int | None = None

    def _saved_worker(self) -> TrainingWorker:
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write a checkpoint; with verl's ``checkpoint.async_save`` only start to. Raises CheckpointError."""
        del hdfs_path, max_ckpt_to_keep  # train/checkpoint.py deletes old ones
        worker = self._saved_worker()
        if worker.checkpoint_config.async_save:
            self._pending = start_save(worker.engine, local_path, global_step)
            return
        with failed_write_is_told(local_path):
            worker.engine.save_checkpoint(local_path=local_path, global_step=global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_ended(self) -> bool:
        """Whether the files of the save in flight are written, by all ranks."""
        return self._pending is None or self._pending.ended()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait for the save in flight. Raises CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_random_states_afresh(self, seed: int) -> None:
        """The next ``load_checkpoint`` leaves the saved random states, which are of another layout."""
        self._new_seed = seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        del hdfs_path, del_local_after_load
        load_checkpoint(self._saved_worker().engine, local_path, new_seed=self._new_seed)


class SavingActorWorker(_Saving, ActorRolloutRefWorker):
    def _saved_worker(self) -> TrainingWorker:
        assert self.actor is not None, "only the actor's role is saved"
        return self.actor


class SavingDetachedActorWorker(_Saving, DetachActorWorker):
    def _saved_worker(self) -> TrainingWorker:
        assert self.actor is not None, "only the actor's role is saved"
        return self.actor


class SavingCriticWorker(_Saving, TrainingWorker):
    def _saved_worker(self) -> TrainingWorker:
        return self


class RecomputingWorker(TrainingWorker):
    """One model with ``memory.recompute = "auto"``: actor, reference or critic."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        super().reset()
        set_budget_of_each_batch(self.engine)
        if self.engine_config.forward_only:
            return
        shape = self.model_config.hf_config.get_text_config().to_dict()
        rest, input_share = token_memory(shape, fused_cross_entropy=self.engine_config.use_fused_kernels)
        budget_tokens = self.engine_config.max_token_len_per_gpu
        recompute_long_micro_batches(self.engine.module, budget_tokens, rest=rest, input_share=input_share)


class RecomputingActorWorker(SavingActorWorker):
    actor_worker_cls = ref_worker_cls = RecomputingWorker


class RecomputingDetachedActorWorker(SavingDetachedActorWorker):
    actor_worker_cls = ref_worker_cls = RecomputingWorker


class RecomputingCriticWorker(_Saving, RecomputingWorker):
    def _saved_worker(self) -> TrainingWorker:
        return self


_OURS: dict[type, tuple[type[Any], type[Any]]] = {
    ActorRolloutRefWorker: (SavingActorWorker, RecomputingActorWorker),
    DetachActorWorker: (SavingDetachedActorWorker, RecomputingDetachedActorWorker),
    TrainingWorker: (SavingCriticWorker, RecomputingCriticWorker),
}


def worker_class(verls: type, memory: Memory) -> type[Any]:
    """The class that takes the place of one of verl's."""
    saving, recomputing = _OURS[verls]
    return recomputing if memory.recompute == "auto" else saving
