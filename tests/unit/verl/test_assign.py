"""How a step's trajectories are assigned to its updates and to the data-parallel ranks."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.platforms import get_platform

if torch.accelerator.is_available():
    pytest.skip("platform cpu refuses an accelerator", allow_module_level=True)
get_platform("cpu").activate()  # verl imports here
from verl.utils.seqlen_balancing import calculate_workload  # noqa: E402

from retool_mcore.verl.assign import assign_to_updates, order_for_ranks  # noqa: E402


def groups_of(prompts: int, size: int) -> list[str | None]:
    return [f"1-{prompt}" for prompt in range(prompts) for _ in range(size)]


def test_every_row_is_assigned_once_and_groups_stay_whole():
    groups = groups_of(12, 4)
    random.Random(0).shuffle(groups)
    assigned = assign_to_updates(groups, 3, (0, 1, 0))
    assert sorted(row for part in assigned for row in part) == list(range(48))
    for part in assigned:
        names = [groups[row] for row in part]
        assert len(part) == 16 and all(names.count(name) == 4 for name in names)


def test_the_seed_decides_and_not_the_order_in_which_responses_ended():
    early, late = groups_of(16, 2), groups_of(16, 2)[::-1]
    first, second = assign_to_updates(early, 4, (0, 1, 0)), assign_to_updates(late, 4, (0, 1, 0))
    assert [{early[row] for row in part} for part in first] == [{late[row] for row in part} for part in second]
    for other in ((1, 1, 0), (0, 2, 0), (0, 1, 1)):
        assert assign_to_updates(early, 4, other) != first


def test_fillers_take_the_places_of_rows_that_outages_took():
    groups = [group for group in groups_of(8, 4) if group not in ("1-3", "1-5")] + [None] * 8
    assigned = assign_to_updates(groups, 4, (0, 1, 0))
    assert [len(part) for part in assigned] == [8, 8, 8, 8]
    assert sorted(sum(groups[row] is None for row in part) for part in assigned) == [0, 0, 4, 4]
    assert sorted(row for part in assigned for row in part) == list(range(len(groups)))


def test_rows_that_make_no_whole_updates_are_refused():
    with pytest.raises(ValueError, match="10 rows cannot be split into 4 equal updates"):
        assign_to_updates(groups_of(5, 2), 4, (0,))
    with pytest.raises(ValueError, match="have 3 rows, but it may have only 2"):
        assign_to_updates([*groups_of(1, 3), None], 2, (0,))


def test_each_rank_finds_its_part_of_every_update_in_turn():
    lengths = [4000 if row % 16 == 0 else 10 for row in range(48)]  # by work alone, one row would be a rank's half
    assigned = assign_to_updates(groups_of(12, 4), 3, (0, 1, 0))
    order = order_for_ranks(assigned, lengths, 2)
    ranks = [order[:24], order[24:]]  # verl's dispatch: one run of rows for each rank
    for update in range(3):  # verl's mini-batches: one run of a rank's rows for each update
        parts = [rank[update * 8 : update * 8 + 8] for rank in ranks]
        assert sorted(parts[0] + parts[1]) == sorted(assigned[update])


def test_ranks_get_about_equal_work_of_an_update():
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(8, 1.5)) for _ in range(64)]
    order = order_for_ranks([list(range(64))], lengths, 2)
    work = calculate_workload(np.array(lengths)).tolist()
    first, second = (sum(work[row] for row in rank) for rank in (order[:32], order[32:]))
    assert first / second == pytest.approx(1.0, abs=0.02)
    assert abs(sum(work[:32]) / sum(work[32:]) - 1.0) > 0.1, "as they came"
