"""A run counts as running while a process holds its folder."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.report.generated import steps, write_run
from tests.unit.report.test_state import state


def test_a_run_is_running_while_a_process_holds_its_folder_however_that_ends(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(4, seconds=10.0))
    code = (
        "import sys, time; from pathlib import Path; from retool_mcore.run.folder import lock_run; "
        f"lock = lock_run(Path({str(run)!r})); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        found = state(run)
        assert (found.name, found.stage, found.seconds_left) == ("running", "steps", pytest.approx(60.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = state(run)
    assert (found.name, found.stage) == ("killed", "after step 4; no checkpoint")
    assert found.seconds_left is None
