"""Which trajectories each optimizer update of a step learns from.

Trajectories come in the order in which they ended, which is the order of their lengths. verl 0.9.1
cuts a step's mini-batches from that order. The updates would then learn from short answers first,
most of them right, and from long ones last, when the weights have moved furthest from those that
sampled them.
"""

from collections.abc import Sequence

import numpy as np
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def deal(groups: Sequence[str | None], updates: int, seed: Sequence[int]) -> list[list[int]]:
    """Rows of each update: whole groups in random order, equally many for each update.

    ``seed`` decides the order. groups [N]: the group of each row, None for a row that only pads the
    batch. Each update gets N / updates rows; padding rows take the place of rows that its groups
    lack. Raises ValueError when the groups do not fit.
    """
    size, rest = divmod(len(groups), updates)
    if rest:
        raise ValueError(f"{len(groups)} rows do not make {updates} updates of one size")
    rows: dict[str, list[int]] = {}
    fillers: list[int] = []
    for row, group in enumerate(groups):
        (fillers if group is None else rows.setdefault(group, [])).append(row)
    names = sorted(rows)  # sorted, not as they came: the same seed deals the same prompts
    order = np.random.default_rng(seed).permutation(len(names))
    dealt = [[row for name in part for row in rows[names[name]]] for part in np.array_split(order, updates)]
    for part in dealt:
        if len(part) > size:
            raise ValueError(f"an update of {size} rows got whole groups of {len(part)}")
        while len(part) < size:
            part.append(fillers.pop())
    return dealt


def order_for_ranks(dealt: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[int]:
    """The row order in which verl's dispatch and mini-batches reproduce the updates of ``deal``.

    verl gives each of ``ranks`` data-parallel ranks a contiguous run of rows, and each rank cuts
    its own into mini-batches one after the other. lengths [N]: tokens of each row. Within an update
    all ranks get equally many rows, of about equal work.
    """
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for part in dealt:
        work = calculate_workload(np.asarray([lengths[row] for row in part], dtype=np.int64)).tolist()
        for rank, chosen in enumerate(get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)):
            by_rank[rank] += [part[index] for index in chosen]
    return [row for rank in by_rank for row in rank]
