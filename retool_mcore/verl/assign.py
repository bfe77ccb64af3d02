"""Assigns trajectories to the optimizer steps of an RL step, and to data-parallel ranks.

verl 0.9.1 splits a step into mini-batches in the order in which trajectories finish, and short
trajectories finish first. The first optimizer steps would then train on short, mostly correct
answers. The last ones would train on long answers, when the weights have moved furthest from the
weights that sampled them. This module assigns whole groups at random instead, from the run's seed.
"""

from collections.abc import Sequence

import numpy as np
from transfer_queue import KVBatchMeta
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def uid_of(key: str) -> str:
    """The prompt's uid, from a trajectory's key in verl, ``PROMPT_SESSION_PART``."""
    return key.rsplit("_", 2)[0]


def groups_of_rows(rows: KVBatchMeta) -> list[str | None]:
    """The prompt's uid of each row; None for padding rows."""
    pairs = zip(rows.keys, rows.tags, strict=True)
    return [None if tag.get("is_padding", False) else uid_of(key) for key, tag in pairs]


def real_keys(rows: KVBatchMeta) -> list[str]:
    """The keys of the rows that are not padding."""
    return [key for key, group in zip(rows.keys, groups_of_rows(rows), strict=True) if group is not None]


def sort_rows(rows: KVBatchMeta) -> None:
    """Sort rows in place by prompt and session, so that the order of arrival has no effect."""

    def place(index: int) -> tuple[str, int, int]:
        uid, session, part = rows.keys[index].rsplit("_", 2)
        return uid, int(session), int(part)

    rows.reorder(sorted(range(len(rows.keys)), key=place))


def assign_to_updates(groups: Sequence[str | None], updates: int, seed: Sequence[int]) -> list[list[int]]:
    """Assign whole groups in random order; each update gets the same number of rows.

    Args:
        groups: [N] the group of each row; None for padding rows.
        updates: number of updates that the N rows are split into.
        seed: seed of the random order of groups.

    Returns:
        For each update, the indices of its N / updates rows. Padding rows fill up an update whose
        groups have fewer rows.

    Raises:
        ValueError: N is not divisible by ``updates``, or an update's groups exceed its size.
    """
    size, rest = divmod(len(groups), updates)
    if rest:
        raise ValueError(f"{len(groups)} rows cannot be split into {updates} equal updates")
    rows: dict[str, list[int]] = {}
    padding: list[int] = []
    for row, group in enumerate(groups):
        (padding if group is None else rows.setdefault(group, [])).append(row)
    names = sorted(rows)  # so that the assignment depends on the seed, not on the order of arrival
    order = np.random.default_rng(seed).permutation(len(names))
    assigned = [[row for name in part for row in rows[names[name]]] for part in np.array_split(order, updates)]
    for part in assigned:
        if len(part) > size:
            raise ValueError(f"the groups of an update have {len(part)} rows, but it may have only {size}")
        while len(part) < size:
            part.append(padding.pop())
    return assigned


def order_for_ranks(assigned: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[int]:
    """The row order for which verl's dispatch and mini-batch split yield ``assigned``.

    verl gives each of ``ranks`` data-parallel ranks a contiguous block of rows. Each rank splits
    its block into consecutive mini-batches. Within an update, all ranks get the same number of rows
    and about the same amount of work. ``lengths`` [N]: tokens of each row.
    """
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for part in assigned:
        work = calculate_workload(np.asarray([lengths[row] for row in part], dtype=np.int64)).tolist()
        for rank, chosen in enumerate(get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)):
            by_rank[rank] += [part[index] for index in chosen]
    return [row for rank in by_rank for row in rank]


def rows_of_update(rows: int, update: int, updates: int, ranks: int) -> list[int]:
    """Indices of the rows that ``update`` trains on, among ``rows`` rows in dispatch order."""
    of_rank, of_update = rows // ranks, rows // ranks // updates
    first = update * of_update
    return [rank * of_rank + row for rank in range(ranks) for row in range(first, first + of_update)]
