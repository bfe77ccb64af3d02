"""Each patch works and is still needed: a process runs without it."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.scenario import ROOT
from tests.unit.platforms import token_stops
from tests.unit.platforms.test_patches import PATCHES

CHANGES = [(patch, change.target) for patch in PATCHES for change in patch.changes]


cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """target -> (what its probe did with the patch, what it did without), from a process of its
    own.
    """
    folder = tmp_path_factory.mktemp("patches")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.platforms.without_patches", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


@cpu_only
@pytest.mark.parametrize(("patch", "target"), CHANGES, ids=[target for _, target in CHANGES])
def test_every_change_works_and_is_still_needed(outcomes, patch, target):
    with_patch, without = outcomes[target]
    assert "Error:" not in with_patch
    assert without != with_patch, f"works without it now: delete the patch ({patch.reason})"


@cpu_only
def test_a_request_ends_at_its_tag_and_is_freed_then(outcomes):
    with_patch, without = outcomes["sglang.srt.managers.schedule_batch.Req._check_token_based_finish"]
    alone, streams = with_patch.split("; ")
    assert alone == "True, 6 tokens, freed True"
    assert without.split("; ")[0] == "True, 2 tokens, freed False"
    same, one_each, spared = map(int, re.findall("[0-9]+", streams))
    assert same == one_each == token_stops.STREAMS, "the scheduler decides as the loop does, in one request a turn"
    assert spared > 10 * token_stops.STREAMS
    assert without.endswith(f"{same} streams the same, 0 with one request a turn, 0 requests spared")
