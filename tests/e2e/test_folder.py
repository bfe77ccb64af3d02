"""A run folder has one writer, survives a kill, and takes its TMPDIR with it."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retool_mcore.run.folder import own_tmpdir
from retool_mcore.run.metrics import read_metrics
from retool_mcore.sandbox.supervisor.slots import remove_stale


def test_what_processes_of_a_run_leave_in_tmpdir_goes_with_it_or_with_its_next_start(tmp_path: Path, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as parent:  # short enough for sockets below it
        monkeypatch.setenv("TMPDIR", parent)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", parent)
        killed = "import os; from pathlib import Path; from retool_mcore.run.folder import own_tmpdir\n"
        killed += "from retool_mcore.sandbox.supervisor.slots import StateDirectory\n"
        killed += f"with own_tmpdir(Path({str(tmp_path)!r})): StateDirectory.create(); os._exit(9)"
        assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
        (folder,) = Path(parent).iterdir()
        (box,) = folder.iterdir()
        assert not remove_stale(folder), "a new one may not be locked yet"
        cgroup = Path((box / "cgroup").read_text()) if (box / "cgroup").exists() else None
        with own_tmpdir(tmp_path, clean=partial(remove_stale, young_s=0)):
            assert not box.exists() and (cgroup is None or not cgroup.exists())
            child = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"]
            made = Path(subprocess.check_output(child, text=True).strip())
            assert made.parent == Path(tempfile.mkdtemp()).parent == folder
            assert folder.stat().st_mode & 0o777 == 0o711, "other uids enter it, and list nothing"
            assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(parent), "compiled kernels outlive a run"
        assert not list(Path(parent).iterdir())
        assert os.environ["TMPDIR"] == tempfile.gettempdir() == parent and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_killed_process_has_written_its_last_row_to_both_files(tmp_path: Path):
    """A resumed run would not write it again: its step is before the checkpoint."""
    script = (
        "import os, pathlib\nfrom retool_mcore.run.metrics import MetricWriter\n"
        "from tests.unit.run.test_trackers import run_in\n"
        f"writer = MetricWriter(run_in(pathlib.Path({str(tmp_path)!r})), resumed_step=0)\n"
        "writer.write(1, {f'n{number}': 1.0 for number in range(150)})\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False, timeout=300).returncode == 9
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert len(board.Tags()["scalars"]) == 150
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 152
