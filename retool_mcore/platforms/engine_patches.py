"""The patches of verl's Megatron engine and of mbridge.

Every platform that has patches applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from retool_mcore.platforms.expert_export import EXPERT_EXPORT_PATCH
from retool_mcore.platforms.model_patches import MODEL_PATCHES
from retool_mcore.platforms.packing import PACKING_PATCHES
from retool_mcore.platforms.padding import PADDING_PATCHES
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.pickles import INDEX_PATCH
from retool_mcore.platforms.versions import requirement

MIN_MICRO_BATCHES = "min_num_micro_batch"  # in a batch's non-tensor data: cut it into at least so many


def _as_many_as_asked(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_micro_batches(data: Any, **kwargs: Any) -> Any:
        from verl.utils.tensordict_utils import get_non_tensor_data

        kwargs["min_num_micro_batch"] = get_non_tensor_data(data, MIN_MICRO_BATCHES, kwargs.get("min_num_micro_batch"))
        return original(data=data, **kwargs)

    return prepare_micro_batches


def _chunks_share_a_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the original for the model's first chunk, then set the functions of all chunks.

    Megatron's interleaved schedule needs a list of them.
    """

    @wraps(original)
    def register_megatron_training_hooks(model: list[Any], optimizer: Any) -> None:
        original(model[:1], optimizer)
        if len(model) == 1:
            return
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        for name, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
            if getattr(config, name) is not None:
                setattr(config, name, [getattr(chunk, method) for chunk in model])

    return register_megatron_training_hooks


def _at_once_without_a_pipeline(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give back ``value``, a weight or its name, where the pipeline's only stage has it.

    The original gathers a pickled description of it from all stages first, for each weight of a
    model, and copies it to the device and back on the way.
    """

    @wraps(original)
    def broadcast(value: Any) -> Any:
        from megatron.core import parallel_state

        alone = parallel_state.get_pipeline_model_parallel_world_size() == 1
        return value if alone and value is not None else original(value)

    return broadcast


MICRO_BATCH_PATCH = Patch(  # memory.recompute = "auto" applies this one on every platform, with or without patches
    target="verl.workers.engine.megatron.transformer_impl.prepare_micro_batches",
    replace=_as_many_as_asked,
    reason="the budget of a micro-batch must hold the longest sequence, and verl then packs all others to it, too",
    applies_to=requirement("verl"),
    remove_when="verl's Megatron engine takes min_num_micro_batch from its data",
)
ENGINE_PATCHES = (
    MICRO_BATCH_PATCH,
    INDEX_PATCH,
    EXPERT_EXPORT_PATCH,
    *MODEL_PATCHES,
    *PACKING_PATCHES,
    *PADDING_PATCHES,
    Patch(
        target="verl.workers.engine.megatron.transformer_impl.register_megatron_training_hooks",
        replace=_chunks_share_a_config,
        reason="with interleaved chunks and overlapped gradient reduction it refuses what it has just set itself",
        applies_to=requirement("verl"),
        remove_when="verl sets the functions of all chunks once for the configuration that they share",
    ),
    *(
        Patch(
            target=f"mbridge.core.bridge.{name}",
            replace=_at_once_without_a_pipeline,
            reason="two exchanges of objects for each weight of each weight sync, also where there is no pipeline",
            applies_to=requirement("mbridge"),
            remove_when="mbridge asks the other stages only where there are any",
        )
        for name in ("broadcast_from_megatron_pp", "broadcast_str_from_megatron_pp")
    ),
)
