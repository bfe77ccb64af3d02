"""The order of prompts under a curriculum: which rows an epoch skips, and the saved state."""

import pickle
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.data.curriculum import SolveRateOrder
from retool_mcore.errors import DataError

RIGHT, WRONG, MIXED = [True, True], [False, False], [True, False]
GROUPS = st.lists(st.tuples(st.integers(0, 11), st.sampled_from([RIGHT, WRONG, MIXED])), max_size=30)


def order(rows: int = 12, *, seed: int = 0, floor: float = 0.125, apart: int = 1) -> SolveRateOrder:
    return SolveRateOrder(rows, seed=seed, floor=floor, apart=apart)


def epochs(sampler: SolveRateOrder, count: int) -> list[list[int]]:
    """The rows of the next epochs, from the start of one."""
    rows: list[list[int]] = [[] for _ in range(count)]
    first = sampler.epoch
    for row in sampler:
        if sampler.epoch >= first + count:
            return rows
        rows[sampler.epoch - first].append(row)
    raise AssertionError("the sampler ended")


def test_unseen_and_mixed_prompts_are_in_every_epoch_once_each_in_another_order():
    sampler = order()
    sampler.observe([(row, MIXED) for row in range(6)])
    rows = epochs(sampler, 3)
    assert all(sorted(each) == list(range(12)) for each in rows)
    assert len({tuple(each) for each in rows}) == 3
    assert epochs(order(), 3) == epochs(order(), 3) != epochs(order(seed=1), 3)


def test_each_uniform_group_halves_a_prompts_share_down_to_the_floor_and_a_mixed_one_restores_it():
    sampler = order(floor=0.1)
    shares = []
    for group in (RIGHT, RIGHT, RIGHT, RIGHT, WRONG, WRONG, MIXED, WRONG, RIGHT):
        sampler.observe([(3, group)])
        shares.append(sampler.share(3))
    assert shares == [0.5, 0.25, 0.125, 0.1, 0.5, 0.25, 1.0, 0.5, 0.5]
    assert sampler.share(4) == 1.0


@given(floor=st.floats(0.05, 1.0), seed=st.integers(0, 50), streak=st.integers(1, 12))
def test_a_prompt_is_in_its_share_of_the_epochs(floor: float, seed: int, streak: int):
    sampler = order(rows=6, seed=seed, floor=floor)
    for _ in range(streak):
        sampler.observe([(0, RIGHT), (1, WRONG)])
    count = 60
    rows = epochs(sampler, count)
    seen = Counter(row for each in rows for row in each)
    share = max(floor, 0.5**streak)
    assert seen[0] == pytest.approx(count * share, abs=1) and seen[1] == pytest.approx(count * share, abs=1)
    assert seen[2] == count
    visits = [number for number, each in enumerate(rows) if 0 in each]
    assert all(later - earlier <= int(1 / share) + 1 for earlier, later in pairwise(visits))


@given(apart=st.integers(1, 12), groups=GROUPS)
def test_rows_that_may_share_a_batch_are_different(apart: int, groups: list[tuple[int, list[bool]]]):
    sampler = order(apart=apart, floor=0.25)
    sampler.observe(groups)
    rows = list(islice(sampler, 80))
    assert all(len(set(rows[start : start + apart])) == apart for start in range(80 - apart))


@given(before=GROUPS, between=GROUPS, drawn=st.integers(0, 70))
def test_a_resumed_order_is_the_same(before: Any, between: Any, drawn: int):
    whole, resumed = order(seed=5, apart=3), order(seed=5, apart=3)
    whole.observe(before)
    list(islice(whole, drawn))
    whole.observe(between)
    saved = pickle.dumps(whole.state_dict())
    resumed.load_state_dict(pickle.loads(saved))
    for _ in range(3):
        assert list(islice(whole, 15)) == list(islice(resumed, 15))
        for sampler in (whole, resumed):
            sampler.observe(between)
    assert whole.metrics() == resumed.metrics()
    with pytest.raises(DataError, match="has 11 rows, but had 12 when the checkpoint was saved"):
        order(rows=11).load_state_dict(pickle.loads(saved))


def test_metrics_count_every_prompt_once():
    sampler = order(rows=10)
    sampler.observe([(0, RIGHT), (1, RIGHT), (1, RIGHT), (2, WRONG), (3, RIGHT), (3, MIXED)])
    shares = {"always": 2.0, "never": 1.0, "mixed": 1.0, "unseen": 6.0}
    assert sampler.metrics() == {
        **{f"curriculum/{name}": count for name, count in shares.items()},
        "curriculum/mean_share": pytest.approx((0.5 + 0.25 + 0.5 + 7.0) / 10),
        "curriculum/epoch": 1.0,
    }


def test_the_data_loader_of_verls_trainer_saves_streaks_that_came_after_its_last_batch():
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    orders = whole, resumed = order(apart=4), order(apart=4)
    first, second = (
        loaders.StatefulDataLoader(list(range(12)), batch_size=4, drop_last=True, sampler=each) for each in orders
    )
    batches = iter(first)
    for _ in range(5):
        next(batches)
    whole.observe([(row, RIGHT) for row in range(8)] * 2)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    again = iter(second)
    assert resumed.streaks == whole.streaks == dict.fromkeys(range(8), 2), "before the first batch is drawn"
    for _ in range(6):
        assert next(batches).tolist() == next(again).tolist()
