"""Batches of SFT's validation, and the counts of a batch."""

from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.data.chat import TokenizedChat
from retool_mcore.data.sft import SftDataset, validation_batches
from retool_mcore.errors import DataError


def one_token_rows(source: str, tokens: range) -> SftDataset:
    return SftDataset(source, [TokenizedChat([token], [1]) for token in tokens], (), max_length_tokens=1)


def test_validation_takes_every_row_of_every_file_once():
    """Nine rows of two files on two ranks: batches go over the end of a file."""
    files = [one_token_rows("a.parquet", range(3)), one_token_rows("b.parquet", range(3, 9))]
    of_ranks = [validation_batches(files, 4, dp_size=2, dp_rank=rank) for rank in range(2)]
    tokens = [[[row.token_ids[0] for row in batch] for batch in batches] for batches in of_ranks]
    assert tokens == [[[0, 2], [4, 6, 8]], [[1, 3], [5, 7]]]


def test_files_with_fewer_rows_than_ranks_are_refused_by_name():
    files = [one_token_rows("a.parquet", range(1)), one_token_rows("b.parquet", range(1))]
    with pytest.raises(DataError, match=r"a\.parquet, b\.parquet has 2 usable rows, fewer than the 4"):
        validation_batches(files, 4, dp_size=4, dp_rank=0)


def test_an_updates_tokens_are_counted_over_all_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch, verl_on_cpu: None):
    from retool_mcore.verl import sft_engine

    engine: Any = object.__new__(sft_engine.SftEngine)
    engine.worker = SimpleNamespace(engine=SimpleNamespace(get_data_parallel_group=lambda: None))
    engine.dp_size, engine._tensordict, engine._config = 2, list, SimpleNamespace(lora="adapters")
    engine.shape = SimpleNamespace(train_flops=lambda lengths, lora: (lengths, lora))
    gathered = lambda into, own, group: into.__setitem__(slice(2), [own, ([7], 2)])  # noqa: E731
    monkeypatch.setattr(sft_engine.dist, "all_gather_object", gathered)
    counts = engine._pack([TokenizedChat([1, 2, 3], [0, 1, 1]), TokenizedChat([4], [1])])[1]
    assert counts == {"perf/total_num_tokens": 11, "loss_tokens": 5, "flops": ([3, 1, 7], "adapters")}
