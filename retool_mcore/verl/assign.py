"""Assigns trajectories to the optimizer updates of a step, and to data-parallel ranks.

verl 0.9.1 cuts a step's mini-batches from the order in which trajectories finished, which is the
order of their lengths. The updates would then learn from short answers first, most of them right,
and from long ones last, when the weights have moved furthest from those that sampled them. Here
whole groups are assigned at random, by the run's seed.
"""

from collections.abc import Sequence

import numpy as np
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def uid_of(key: str) -> str:
    """The prompt of a trajectory, from verl's key PROMPT_SESSION_PART."""
    return key.rsplit("_", 2)[0]


def groups_of_rows(rows: KVBatchMeta) -> list[str | None]:
    """The prompt of each row; None for a row that only pads the batch."""
    pairs = zip(rows.keys, rows.tags, strict=True)
    return [None if tag.get("is_padding", False) else uid_of(key) for key, tag in pairs]


def real_keys(rows: KVBatchMeta) -> list[str]:
    """The keys of the rows that are trajectories."""
    return [key for key, group in zip(rows.keys, groups_of_rows(rows), strict=True) if group is not None]


def sort_rows(rows: KVBatchMeta) -> None:
    """Sort by prompt and session, so that nothing depends on which trajectory finished first."""

    def place(index: int) -> tuple[str, int, int]:
        uid, session, part = rows.keys[index].rsplit("_", 2)
        return uid, int(session), int(part)

    rows.reorder(sorted(range(len(rows.keys)), key=place))


def assign_to_updates(groups: Sequence[str | None], updates: int, seed: Sequence[int]) -> list[list[int]]:
    """Rows of each update: whole groups in random order, equally many for each update.

    Args:
        groups: [N] the group of each row; None for a row that only pads the batch.
        updates: how many updates learn from the N rows.
        seed: decides the order.

    Returns:
        N / updates rows for each update. Padding rows take the place of rows that its groups lack.

    Raises:
        ValueError: the groups do not fit.
    """
    size, rest = divmod(len(groups), updates)
    if rest:
        raise ValueError(f"{len(groups)} rows do not make {updates} updates of one size")
    rows: dict[str, list[int]] = {}
    padding: list[int] = []
    for row, group in enumerate(groups):
        (padding if group is None else rows.setdefault(group, [])).append(row)
    names = sorted(rows)  # not as they came: the same seed assigns the same prompts
    order = np.random.default_rng(seed).permutation(len(names))
    assigned = [[row for name in part for row in rows[names[name]]] for part in np.array_split(order, updates)]
    for part in assigned:
        if len(part) > size:
            raise ValueError(f"an update of {size} rows got whole groups of {len(part)}")
        while len(part) < size:
            part.append(padding.pop())
    return assigned


def order_for_ranks(assigned: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[int]:
    """The row order in which verl's dispatch and mini-batches reproduce ``assigned``.

    verl gives each of ``ranks`` data-parallel ranks a contiguous run of rows, and each rank cuts
    its own into mini-batches one after the other. Within an update all ranks get equally many rows,
    of about equal work. ``lengths`` [N]: tokens of each row.
    """
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for part in assigned:
        work = calculate_workload(np.asarray([lengths[row] for row in part], dtype=np.int64)).tolist()
        for rank, chosen in enumerate(get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)):
            by_rank[rank] += [part[index] for index in chosen]
    return [row for rank in by_rank for row in rank]


def rows_of_update(rows: int, update: int, updates: int, ranks: int) -> list[int]:
    """Which of ``rows``, in the order of ``order_for_ranks``, the given update learns from."""
    of_rank, of_update = rows // ranks, rows // ranks // updates
    first = update * of_update
    return [rank * of_rank + row for rank in range(ranks) for row in range(first, first + of_update)]
