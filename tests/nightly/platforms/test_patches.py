"""Each patch of training works and is still needed: its probe has another outcome without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retool_mcore.platforms import get_platform
from tests.scenario import ROOT

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
REASONS = {change.target: patch.reason for patch in get_platform("cpu").patches() for change in patch.changes}


def test_every_change_works_and_is_still_needed(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.nightly.platforms.without_patches", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads((tmp_path / "result.json").read_text())
    failed = {target: with_patch for target, (with_patch, _) in outcomes.items() if "Error:" in with_patch}
    assert failed == {}
    obsolete = {target: REASONS[target] for target, (with_patch, without) in outcomes.items() if with_patch == without}
    assert obsolete == {}, "these work without the patch now: delete it"
