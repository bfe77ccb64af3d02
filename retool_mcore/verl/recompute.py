"""``memory.recompute = "auto"``: chooses the number of recomputed layers for each micro-batch.

By default Megatron recomputes the same number of layers in every micro-batch, so one long sequence
in the data slows down all short ones. Megatron reads the setting in each forward pass
(transformer_block.py, ``TransformerBlock.forward``), so we set it before each. verl packs all
micro-batches of a run to one token budget, which must fit the longest possible sequence; here each
batch has its own budget.
"""

from collections.abc import Mapping, Sequence
from functools import partial, wraps
from math import ceil
from typing import Any

from retool_mcore.model.shape import (
    layers_to_recompute,
    micro_batch_tokens,
    shape_of_hf_config,
    token_memory,
)
from retool_mcore.platforms.patches_verl import MICRO_BATCH_PATCH, MIN_MICRO_BATCHES, lengths_of


def recompute_by_length(worker: Any) -> None:
    """Enable ``memory.recompute = "auto"`` for the model that verl's ``worker`` trains."""
    config = worker.engine_config
    shape = shape_of_hf_config(worker.model_config.hf_config)
    other_memory, input_share = token_memory(shape, fused_cross_entropy=config.use_fused_kernels)
    recompute_long_micro_batches(
        worker.engine.module, config.max_token_len_per_gpu, other_memory=other_memory, input_share=input_share
    )


def recompute_long_micro_batches(
    chunks: Sequence[Any], budget_tokens: int, *, other_memory: float, input_share: float
) -> None:
    """Make Megatron's model ``chunks`` choose their recomputed layers before each forward pass.

    The choice depends on the number of tokens in the micro-batch.
    """
    for wrapped in chunks:
        chunk = wrapped
        while not hasattr(chunk, "decoder"):  # unwraps DistributedDataParallel and Float16Module
            chunk = chunk.module
        choose = partial(_choose, budget_tokens=budget_tokens, other_memory=other_memory, input_share=input_share)
        chunk.decoder.register_forward_pre_hook(choose, with_kwargs=True)


def set_budget(data: Any, lengths: Sequence[Sequence[int]], usual_tokens: int, cp: int) -> None:
    """Set the token budget by which verl splits a batch into micro-batches.

    The budget fits the batch's longest sequence. The minimum number of micro-batches, which verl
    reads only with ``MICRO_BATCH_PATCH``, is what the usual budget would give, at most one per
    sequence.

    Args:
        data: this rank's TensorDict, changed in place.
        lengths: tokens of each sequence of each data-parallel rank. Must be the same on all ranks,
            so that they set the same budget.
        usual_tokens: the usual budget of one rank, in tokens, before it is multiplied by ``cp``.
        cp: context-parallel size.
    """
    from verl.utils import tensordict_utils as tu

    longest = max(max(rank) for rank in lengths)
    usual = ceil(max(sum(rank) for rank in lengths) / (usual_tokens * cp))
    least = min(usual, *(len(rank) for rank in lengths))
    budget = micro_batch_tokens(usual_tokens, longest, cp)
    tu.assign_non_tensor(data, max_token_len_per_gpu=budget, **{MIN_MICRO_BATCHES: least})


def set_budget_of_each_batch(engine: Any) -> None:
    """Make verl's Megatron ``engine`` call ``set_budget`` for each batch."""
    import torch.distributed as dist

    MICRO_BATCH_PATCH.apply()
    forward_backward, config = engine.forward_backward_batch, engine.engine_config

    @wraps(forward_backward)
    def forward_backward_batch(data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        usual = config.infer_max_token_len_per_gpu if forward_only else config.max_token_len_per_gpu
        lengths: list[list[int]] = [[]] * engine.get_data_parallel_size()
        dist.all_gather_object(lengths, list(lengths_of(data["input_ids"])), group=engine.get_data_parallel_group())
        set_budget(data, lengths, usual, config.context_parallel_size)
        return forward_backward(data, loss_function, forward_only=forward_only)

    engine.forward_backward_batch = forward_backward_batch


def _choose(
    block: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    budget_tokens: int,
    other_memory: float,
    input_share: float,
) -> None:
    if not block.training:
        return
    config = block.config
    hidden_T1H = kwargs.get("hidden_states", args[0] if args else None) if block.pre_process else block.input_tensor
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    layers = len(block.layers)
    recomputed = layers_to_recompute(
        hidden_T1H.shape[0] * split, budget_tokens, layers, other_memory=other_memory, input_share=input_share
    )
    config.recompute_granularity = "full" if recomputed else None
    config.recompute_method = "block" if recomputed else None
    config.recompute_num_layers = min(recomputed, layers) if recomputed else None
