"""The sandbox's socket lies in a folder that only the user can enter."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore.sandbox.supervisor.slots import remove_stale
from tests.scenario import ROOT

# A stand-in answers for `retool get`: level and number of workers.
SCRIPT = """
source launch/nodes.sh
id() { echo "$USER_ID"; }
RUN=mine
PYTHON=stand_in
stand_in() { echo rlimits 1; }
start_sandbox any.toml
"""


# The service itself is real: sandbox.sh calls it by the `python` of PATH.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def started(**env: str) -> str:
    env = os.environ | {"PATH": PATH} | env
    done = subprocess.run(["bash", "-c", SCRIPT], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stderr}"


@pytest.fixture
def user_id() -> Iterator[str]:
    number = uuid.uuid4().hex
    yield number
    shutil.rmtree(f"/tmp/retool-sandboxes-{number}", ignore_errors=True)


def test_the_folders_are_the_users_alone_and_no_other_sandbox_sweeps_them(user_id: str, tmp_path: Path):
    old = os.umask(0)
    try:
        assert started(USER_ID=user_id, SANDBOX_DIR="").startswith("0 ")
        assert started(USER_ID=user_id, SANDBOX_DIR=str(tmp_path / "own")).startswith("0 ")
    finally:
        os.umask(old)
    for folder in (Path(f"/tmp/retool-sandboxes-{user_id}"), tmp_path / "own"):
        assert [each.stat().st_mode & 0o777 for each in (folder, folder / "mine")] == [0o700, 0o700]
    # A sandbox that opens removes what killed ones left, by name, age and lock.
    swept = Path(f"/tmp/retool-sandboxes-{user_id}")
    os.utime(swept, (0, 0))
    remove_stale(swept.parent)
    assert (swept / "mine").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_that_another_user_made_is_refused(user_id: str):
    Path(f"/tmp/retool-sandboxes-{user_id}").mkdir(mode=0o777)
    os.chown(f"/tmp/retool-sandboxes-{user_id}", 65534, 65534)
    told = started(USER_ID=user_id, SANDBOX_DIR="")
    assert f"error: /tmp/retool-sandboxes-{user_id} is another user's" in told and "SANDBOX_DIR" in told
