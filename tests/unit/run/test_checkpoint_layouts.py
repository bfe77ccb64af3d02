"""Which checkpoints resume on another parallel layout, and with whose random states."""

from pathlib import Path

import pytest

from retool_mcore.errors import CheckpointError
from retool_mcore.run import checkpoint
from tests.unit.run.test_checkpoint_files import run_in, save

TP2, DP2 = ("parallel.tp=2",), ("parallel.tp=1",)
FOUR = ("cluster.gpus_per_node=4",)


def test_a_reshardable_checkpoint_resumes_on_any_layout(tmp_path: Path):
    save(run_in(tmp_path, *TP2, "checkpoint.reshardable=true"), 50)
    found = checkpoint.find_resume(run_in(tmp_path, *DP2))
    assert found is not None and found.reshardable and not found.has_random_states_of(run_in(tmp_path, *DP2))


PP2 = ("parallel.tp=1", "parallel.pp=2")


def test_random_states_are_those_of_a_pipeline_rank(tmp_path: Path):
    """Of layouts that differ in pp and dp alone."""
    save(run_in(tmp_path, *PP2, "checkpoint.reshardable=true"), 50)
    found = checkpoint.find_resume(run_in(tmp_path, *DP2))
    assert found is not None
    assert not found.has_random_states_of(run_in(tmp_path, *DP2))
    assert found.has_random_states_of(run_in(tmp_path, *PP2, *FOUR))


def test_without_resharding_a_change_of_the_pipeline_is_refused(tmp_path: Path):
    save(run_in(tmp_path, *PP2), 50)
    with pytest.raises(CheckpointError, match=r"was saved on tp 1, pp 2, .* layout is tp 1, pp 1, .* dp 2\."):
        checkpoint.find_resume(run_in(tmp_path, *DP2))


def test_experts_stay_spread_over_as_many_ranks(tmp_path: Path):
    """Megatron-core 0.16.1 raises KeyError: 'optimizer' for ep 2 to ep 1; other sizes change as
    with a dense model.
    """
    save(run_in(tmp_path, *DP2, "parallel.ep=2", "checkpoint.reshardable=true"), 50)
    with pytest.raises(CheckpointError, match=r"ep 1, dp 2\. .* may not change\. Set parallel\.ep = 2, or start"):
        checkpoint.find_resume(run_in(tmp_path, *DP2))


def test_experts_stay_cut_as_they_are(tmp_path: Path):
    cut = run_in(tmp_path, *TP2, "checkpoint.reshardable=true")
    save(cut, 50)
    found = checkpoint.find_resume(cut)
    assert found is not None and found.layout["etp"] == 0
    with pytest.raises(CheckpointError, match=r"etp 1, dp 1\. .* Set parallel\.etp = 0, or start"):
        checkpoint.find_resume(run_in(tmp_path, *TP2, "parallel.etp=1", "checkpoint.reshardable=true"))


def test_without_it_only_the_number_of_data_parallel_ranks_may_change(tmp_path: Path):
    save(run_in(tmp_path, *TP2), 50)
    wider = run_in(tmp_path, *TP2, *FOUR)
    found = checkpoint.find_resume(wider)
    assert found is not None and found.has_random_states_of(wider)
    said = (
        r"was saved on tp 2, pp 1, vpp 1, cp 1, ep 1, dp 1, and the run's layout is tp 1, pp 1, vpp 1, cp 1, ep 1, "
        r"dp 2\. .* on its own layout with checkpoint\.reshardable = true"
    )
    with pytest.raises(CheckpointError, match=said):
        checkpoint.find_resume(run_in(tmp_path, *DP2))
