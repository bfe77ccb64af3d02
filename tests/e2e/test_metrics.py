"""A killed process has written its last metrics row."""

import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retool_mcore.run.metrics import (
    read_metrics,
)


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
