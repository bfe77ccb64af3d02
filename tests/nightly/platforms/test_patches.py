"""Each patch works and is still needed: its probe has another outcome without it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from retool_mcore.platforms import get_platform
from tests.nightly.platforms.without_patches import PROBES
from tests.scenario import ROOT

CHANGES = [(patch, change.target) for patch in get_platform("cpu").patches() for change in patch.changes]
cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Target -> [outcome of its probe with the patch, outcome without], from another process."""
    folder = tmp_path_factory.mktemp("patches")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.nightly.platforms.without_patches", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


def test_every_probe_is_of_a_change():
    assert PROBES.keys() <= {target for _, target in CHANGES}


@cpu_only
@pytest.mark.parametrize(("patch", "target"), CHANGES, ids=[target for _, target in CHANGES])
def test_every_change_works_and_is_still_needed(outcomes, patch, target):
    with_patch, without = outcomes[target]
    assert "Error:" not in with_patch
    assert without != with_patch, f"works without it now: delete the patch ({patch.reason})"


@cpu_only
def test_a_request_ends_at_its_tag_and_is_freed_then(outcomes):
    with_patch, without = outcomes["sglang.srt.managers.schedule_batch.Req._check_token_based_finish"]
    assert with_patch == "True, 6 tokens, freed True"
    assert without == "True, 2 tokens, freed False"
