"""How a step's trajectories are assigned to its updates and to the data-parallel ranks."""

import random

import pytest

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def groups_of(prompts: int, size: int) -> list[str | None]:
    return [f"1-{prompt}" for prompt in range(prompts) for _ in range(size)]


def test_every_row_is_assigned_once_groups_stay_whole_and_fillers_take_the_places_of_lost_rows():
    from retool_mcore.verl.assign import assign_to_updates

    groups = [group for group in groups_of(8, 4) if group not in ("1-3", "1-5")] + [None] * 8
    random.Random(0).shuffle(groups)
    assigned = assign_to_updates(groups, 4, (0, 1, 0))
    assert sorted(row for part in assigned for row in part) == list(range(32))
    fillers: list[int] = []
    for part in assigned:
        names = [groups[row] for row in part]
        assert len(part) == 8 and all(names.count(name) == 4 for name in {*names} - {None})
        fillers.append(names.count(None))
    assert sorted(fillers) == [0, 0, 4, 4]
    assert assign_to_updates(groups, 4, (1, 1, 0)) != assigned, "the run's seed decides"


def test_each_rank_finds_its_part_of_every_update_in_turn():
    from retool_mcore.verl.assign import assign_to_updates, order_for_ranks

    lengths = [4000 if row % 16 == 0 else 10 for row in range(48)]  # by work alone, one row would be a rank's half
    assigned = assign_to_updates(groups_of(12, 4), 3, (0, 1, 0))
    order = order_for_ranks(assigned, lengths, 2)
    ranks = [order[:24], order[24:]]  # verl's dispatch: one run of rows for each rank
    for update in range(3):  # verl's mini-batches: one run of a rank's rows for each update
        parts = [rank[update * 8 : update * 8 + 8] for rank in ranks]
        assert sorted(parts[0] + parts[1]) == sorted(assigned[update])
        work = [sum(lengths[row] for row in part) for part in parts]
        assert max(work) - min(work) <= 4000, "about equal"
