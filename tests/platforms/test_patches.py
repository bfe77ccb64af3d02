"""Patches are records: each fits its target, is still needed, and can be taken back."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches import ModuleView, Patch
from retool_mcore.verl.checkpoint import CHECKPOINT_PATCHES
from tests.platforms import token_stops
from tests.scenario import ROOT

PATCHES = (*get_platform("cpu").patches(), *CHECKPOINT_PATCHES)
cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


def tau_patch(**changes) -> Patch:
    record = {
        "target": "math.tau",
        "replace": lambda tau: -tau,
        "reason": "tau should point the other way",
        "applies_to": "pydantic>=2",
        "remove_when": "the circle turns",
    }
    return Patch(**record | changes)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """target -> (what its probe did with the patch, what it did without), from a process of its
    own.
    """
    folder = tmp_path_factory.mktemp("patches")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.platforms.without_patches", folder],
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
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_patch_works_and_is_still_needed(outcomes, patch):
    with_patch, without = outcomes[patch.target]
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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_patch_says_why_and_until_when(patch):
    assert len(patch.reason) > 20
    assert len(patch.remove_when) > 20
    assert "<" in patch.applies_to or "==" in patch.applies_to, "an open range would patch code nobody has read"


def test_a_patch_is_applied_once_and_can_be_taken_back():
    patch = tau_patch()
    before = math.tau
    patch.apply()
    patch.apply()
    try:
        assert math.tau == -before
        assert patch.applied
    finally:
        patch.revert()
    assert math.tau == before
    assert not patch.applied


def test_a_patch_refuses_a_version_it_was_not_written_for():
    with pytest.raises(PlatformError, match=r"math\.tau was written for pydantic<2, and pydantic 2\S+ is installed"):
        tau_patch(applies_to="pydantic<2").apply()


def test_a_patch_refuses_a_package_that_is_not_installed():
    with pytest.raises(PlatformError, match="no-such-package is not installed"):
        tau_patch(applies_to="no-such-package>=1").apply()


@pytest.mark.parametrize("target", ["math.no_such_number", "no_such_module.value", "math.pi.no_such_part.value"])
def test_a_patch_refuses_a_target_that_moved(target):
    with pytest.raises(PlatformError, match="there is no such attribute any more"):
        tau_patch(target=target).apply()


def test_a_module_view_changes_what_one_file_sees():
    view = ModuleView(math, floor=lambda x: 42)
    assert view.floor(1.5) == 42
    assert view.sqrt(9) == 3
    assert math.floor(1.5) == 1
