"""Reading a checkpoint calls nothing that its files name."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from retool_mcore.platforms.patches_torch import INDEX_PATCH, files_are_data
from retool_mcore.verl.checkpoint import load_checkpoint
from tests.platforms.doors import Calls, read_an_index

PATCH = INDEX_PATCH


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, torch.hub.load])
def test_an_index_that_calls_is_refused(patched, tmp_path: Path, function):
    with pytest.raises(pickle.UnpicklingError, match=r"its index names .*, which no checkpoint does"):
        read_an_index(Calls(function, str(tmp_path / "called")))
    assert not (tmp_path / "called").exists()


def test_torchs_own_index_is_read(patched, tmp_path: Path):
    state = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "word": "said"}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    found = {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "word": ""}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["word"] == "said"
    assert all(torch.equal(found[name], state[name]) for name in ("weight", "half"))
    assert isinstance(read_an_index(Metadata(state_dict_metadata={})), Metadata)


def test_what_a_reader_would_let_call_calls_nothing_within_the_block(tmp_path: Path):
    torch.save({"state": Calls(os.mkdir, str(tmp_path / "called"))}, tmp_path / "data.pt")
    with files_are_data(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "data.pt", weights_only=False)
    assert not (tmp_path / "called").exists()
    torch.load(tmp_path / "data.pt", weights_only=False)
    assert (tmp_path / "called").exists(), "afterwards callers decide again"


def test_a_checkpoints_object_that_calls_is_refused(tmp_path: Path):
    """torch's planner reads objects among the tensors with weights_only=False."""
    engine = SimpleNamespace(
        bridge=None,
        lr_scheduler=SimpleNamespace(num_steps=7),
        checkpoint_mananager=SimpleNamespace(checkpoint_load_contents=["model"]),
        optimizer=SimpleNamespace(param_groups=[]),
        load_checkpoint=lambda local_path, **_: load({"state": ""}, checkpoint_id=local_path, no_dist=True),
    )
    save({"state": Calls(os.mkdir, str(tmp_path / "called"))}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(CheckpointException, match="weights_only"):
        load_checkpoint(engine, str(tmp_path / "saved"))
    assert not (tmp_path / "called").exists()
