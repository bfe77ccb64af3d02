"""Root's executions have uids that no other sandbox on the machine uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.supervisor.confine import FIRST_UID, NUM_UIDS
from retool_mcore.sandbox.supervisor.slots import claim_uid
from tests.sandbox.ordinary import OrdinaryUser
from tests.sandbox.sandbox_helpers import ROOT


def test_no_uid_is_claimed_twice_until_its_process_is_killed(tmp_path: Path):
    directory = tmp_path / "uids"  # not the shared one, because this test claims all uids
    code = "from pathlib import Path\nfrom retool_mcore.sandbox.supervisor.slots import claim_uid\n"
    code += f"print(claim_uid(Path({str(directory)!r}))[0], flush=True)\nopen(0).read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    first = int(other.stdout.readline())
    uids, locks = zip(*(claim_uid(directory) for _ in range(NUM_UIDS - 1)), strict=True)
    try:
        assert len({first, *uids}) == NUM_UIDS
        assert min(uids) >= FIRST_UID and max(uids) < FIRST_UID + NUM_UIDS < 65_534
        with pytest.raises(SandboxUnavailable, match="use all 4480 execution uids"):
            claim_uid(directory)
        other.kill()
        other.wait()
        uid, lock = claim_uid(directory)
        locks += (lock,)
        assert uid == first
    finally:
        for lock in locks:
            os.close(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to start a process of another user")
def test_another_user_cannot_take_the_uids(ordinary_user: OrdinaryUser):
    os.close(claim_uid()[1])  # creates the directory, if this is the first sandbox
    code = "from retool_mcore.sandbox.supervisor.slots import claim_uid\nclaim_uid()"
    assert "not a directory that only root can enter" in ordinary_user.run(code).stderr
