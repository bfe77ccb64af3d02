"""`retool watch` follows a run in a terminal until it ends."""

import os
import subprocess
import sys
from pathlib import Path

from retool_mcore.run.folder import lock_run
from tests.unit.report.generated import steps, write_rows, write_run


def test_in_a_terminal_it_follows_the_run_to_its_end(tmp_path: Path):
    run = write_run(tmp_path / "run", rows=steps(2))
    code = (
        "import sys; from pathlib import Path; from rich.console import Console; "
        "from retool_mcore.report.terminal import watch; "
        f"watch(Path({str(run)!r}), Console(force_terminal=True, width=110), once=False)"
    )
    with lock_run(run):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "LINES": "40"}
        )
        assert process.stdout is not None
        seen = b""
        while b"step 2 of 10" not in seen:
            seen += os.read(process.stdout.fileno(), 65536)
        assert process.poll() is None
        write_rows(run, steps(10))
        while b"step 10 of 10" not in seen:
            seen += os.read(process.stdout.fileno(), 65536)
        assert process.poll() is None
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and b"ended" in rest
