"""verl's training workers, extended.

They use the same learning-rate schedule in all modes, save checkpoints asynchronously, load them
into a different parallel layout, choose recomputation per micro-batch and report peak memory.
"""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import response_from_nested

from retool_mcore.config import Memory
from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.platforms.patches import apply_all
from retool_mcore.run import heartbeat
from retool_mcore.verl.checkpoint import PendingSave, load_checkpoint, new_seed_if_relaid_out, save, start_save
from retool_mcore.verl.update_worker import RecomputingWorker, UpdateWorker
from retool_mcore.verl.weight_check import SentWeights, Sums


class _Saving:
    """Mixin for one of verl's workers; list it before verl's class.

    Its methods run on every rank of the role.
    """

    _pending: PendingSave | None = None

    def _saved_worker(self) -> Any:
        return self

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_heartbeat(self, run_dir: str) -> None:
        """Make this process send heartbeats to the run's watchdog (run/heartbeat.py)."""
        heartbeat.start(Path(run_dir))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write a checkpoint, or start writing one if verl's ``checkpoint.async_save`` is set.

        Ignores ``max_ckpt_to_keep``: run/checkpoint.py deletes old checkpoints. Raises
        CheckpointError.
        """
        worker = self._saved_worker()
        if worker.checkpoint_config.async_save:
            self._pending = start_save(worker.engine, local_path, global_step)
            return
        save(worker.engine, local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_ended(self) -> bool:
        """Whether every rank's writer of the pending save has ended."""
        return self._pending is None or self._pending.ended()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait for the pending save. Raises CheckpointError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def peak_memory_gib(self) -> float:
        """Peak device memory of this rank's process, in GiB; the caller gets one value per rank."""
        return get_platform(os.environ[PLATFORM_ENV]).peak_memory_gib()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        worker = self._saved_worker()
        worker.free_reserved_memory()
        new_seed = new_seed_if_relaid_out(worker.engine, Path(local_path).parent)
        load_checkpoint(worker.engine, local_path, new_seed=new_seed)


class _Actor(_Saving):
    """Methods of the actor's worker in all modes."""

    actor_worker_cls = UpdateWorker
    actor: UpdateWorker | None
    rollout: Any  # verl's adapter of the engine on this rank's device; None in mode "async"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()  # type: ignore[misc]
        if self.actor is not None:
            self._sent = SentWeights(self.actor.engine)
        if self.rollout is not None:
            give_engine_its_own_config(self.rollout)
            apply_all(get_platform(os.environ[PLATFORM_ENV]).weight_sync_patches())

    def _saved_worker(self) -> UpdateWorker:
        assert self.actor is not None, "only the actor's role is saved"
        return self.actor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget_engines(self) -> None:
        """Prepare for a restart of engines: free torch's cached device memory for them.

        If the engines share the actor's devices, also look up their servers again at the next sync.
        """
        get_torch_device().empty_cache()
        if self.rollout is not None:
            self.rollout._engine = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sent_weights(self) -> tuple[str, Sums]:
        """``SentWeights.sums``; its sums are empty on all ranks but the first."""
        return self._sent.sums()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def log_probs_of_update(self, data: TensorDict) -> TensorDict | None:
        """Store ``UpdateWorker.log_probs`` in the column "old_log_probs".

        The mismatch metrics then read the same column whether the actor computes its log-probs
        before or during the update. Returns None on ranks without outputs.
        """
        assert self.actor is not None, "only the actor is updated"
        kept, self.actor.log_probs = [row for update in self.actor.log_probs for row in update.unbind()], []
        if not kept:
            return None
        assert len(kept) == len(data), f"the updates kept {len(kept)} rows, not {len(data)}"
        rows = torch.nested.as_nested_tensor(kept, layout=torch.jagged).cpu()
        return tu.get_tensordict({"old_log_probs": response_from_nested(rows, data["response_mask"])})


class SavingActorWorker(_Actor, ActorRolloutRefWorker):
    """The actor's worker in the modes in which engines and actor share devices."""


class SavingDetachedActorWorker(_Actor, DetachActorWorker):
    """The actor's worker in mode "async".

    It keeps a copy of the weights from the start of a step, for the old log-probs.
    """


class SavingCriticWorker(_Saving, UpdateWorker):
    """The critic's worker, used with algorithm.name = "ppo"."""


class RecomputingActorWorker(SavingActorWorker):
    actor_worker_cls = ref_worker_cls = RecomputingWorker


class RecomputingDetachedActorWorker(SavingDetachedActorWorker):
    actor_worker_cls = ref_worker_cls = RecomputingWorker


class RecomputingCriticWorker(_Saving, RecomputingWorker):
    pass


def give_engine_its_own_config(adapter: Any) -> None:
    """Give verl's ``adapter`` of an engine its own copy of the model config.

    verl writes the engine's quantization into the Hugging Face config that adapter and actor share
    (sglang_rollout.py, ``ServerAdapter.__init__``). Models that the actor saves would then declare
    FP8 although their weights are not quantized.
    """
    shared = adapter.model_config
    adapter.model_config = copy.copy(shared)
    adapter.model_config.hf_config = copy.deepcopy(shared.hf_config)
    vars(shared.hf_config).pop("quantization_config", None)


WORKER_CLASSES: dict[type, tuple[type[Any], type[Any]]] = {
    ActorRolloutRefWorker: (SavingActorWorker, RecomputingActorWorker),
    DetachActorWorker: (SavingDetachedActorWorker, RecomputingDetachedActorWorker),
    TrainingWorker: (SavingCriticWorker, RecomputingCriticWorker),
}


def worker_class(verl_class: type, memory: Memory) -> type[Any]:
    """Our replacement for verl's worker class ``verl_class``."""
    saving, recomputing = WORKER_CLASSES[verl_class]
    return recomputing if memory.recompute == "auto" else saving
