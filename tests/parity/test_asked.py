"""A signal that one rank received reaches all ranks."""

import multiprocessing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from retool_mcore.train.sft import _signal_of_any_rank

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="the ranks of this test have no device")


def rank(store: Path, number: int, signal: int, results: multiprocessing.SimpleQueue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        results.put((_signal_of_any_rank(signal), reduced.call_count))
    dist.destroy_process_group()


@pytest.mark.parametrize("signals", [(2, 15), (0, 0)])
def test_a_signal_of_any_rank_is_known_by_one_exchange(signals: tuple[int, int], tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(tmp_path / "store", n, signals[n], results)) for n in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0]
    assert [results.get(), results.get()] == [(max(signals), 1)] * 2
