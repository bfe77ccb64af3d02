"""SFT's sequences in the form of verl's worker, and what a step counts over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.config import SftConfig
from retool_mcore.data.chat import Rendered
from retool_mcore.model.shape import ModelShape
from retool_mcore.verl.recompute import set_budget


class Packer:
    """Makes the batches of one data-parallel rank; ``engine`` is verl's."""

    def __init__(self, config: SftConfig, shape: ModelShape, engine: Any, pad_token_id: int) -> None:
        self._config, self._shape, self._pad_token_id = config, shape, pad_token_id
        self._group, self._ranks = engine.get_data_parallel_group(), engine.get_data_parallel_size()

    def pack(self, sequences: Sequence[Rendered]) -> tuple[Any, dict[str, float]]:
        """The TensorDict of this rank's ``sequences``, and counts over the global batch.

        Collective over the data-parallel ranks. The counts are tokens, loss_tokens and the flops of
        one update.
        """
        data = self._tensordict(sequences)
        mine = ([len(s.token_ids) for s in sequences], sum(sum(s.loss_mask) for s in sequences))
        of_ranks: list[Any] = [None] * self._ranks
        dist.all_gather_object(of_ranks, mine, group=self._group)
        by_rank = [lengths for lengths, _ in of_ranks]
        self._tell_lengths(data, by_rank)
        lengths = [length for of_rank in by_rank for length in of_rank]
        return data, {
            "tokens": float(sum(lengths)),
            "loss_tokens": float(sum(trained for _, trained in of_ranks)),
            "flops": self._shape.train_flops(lengths, self._config.lora),
        }

    def _tensordict(self, sequences: Sequence[Rendered]) -> Any:
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
                "pad_token_id": self._pad_token_id,
            },
        )

    def _tell_lengths(self, data: Any, by_rank: Sequence[Sequence[int]]) -> None:
        """Give verl the lengths of all ranks, which the micro-batches depend on."""
        from tensordict.tensorclass import NonTensorData
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, global_token_num=NonTensorData([length for each in by_rank for length in each]))
        if self._config.memory.recompute == "auto":
            set_budget(data, by_rank, self._config.train.micro_batch_tokens, self._config.parallel.cp)
